# `cmake --install` puts programs, libraries, headers and find_package(oscar) into one prefix.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/lib/oscar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh" PATTERN "*_internal.h" EXCLUDE)
# Where lib/oscar/checkpoint/checkpoint.cpp looks for the embedded default and the needle tasks.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/datasets DESTINATION ${CMAKE_INSTALL_DATADIR}/oscar)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY_NOTICES.md
        DESTINATION ${CMAKE_INSTALL_DATADIR}/oscar)
install(EXPORT oscarTargets NAMESPACE oscar:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/oscarConfig.cmake.in
  ${PROJECT_BINARY_DIR}/oscarConfig.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/oscarConfig.cmake ${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
