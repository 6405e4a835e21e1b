# `cmake --install` puts programs, libraries, headers and find_package(oscar) into one prefix.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/lib/oscar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh" PATTERN "*_internal.h" EXCLUDE)
# Where lib/oscar/model/checkpoint/checkpoint.cpp looks for the embedded default and the needle tasks.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/datasets DESTINATION ${CMAKE_INSTALL_DATADIR}/oscar
        PATTERN make EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY_NOTICES.md
        DESTINATION ${CMAKE_INSTALL_DATADIR}/oscar)
# Each program writes its own man page and completion, from its options, when it is installed.
get_property(programs GLOBAL PROPERTY OSCAR_PROGRAMS)
foreach(program IN LISTS programs)
  install(CODE "
    foreach(part man-page completion)
      execute_process(COMMAND \"$<TARGET_FILE:${program}>\" --print-\${part}
                      OUTPUT_VARIABLE text RESULT_VARIABLE failed)
      if(failed)
        message(FATAL_ERROR \"${program} --print-\${part} failed: \${failed}\")
      endif()
      set(file ${CMAKE_INSTALL_MANDIR}/man1/${program}.1)
      if(part STREQUAL completion)
        set(file ${CMAKE_INSTALL_DATADIR}/bash-completion/completions/${program})
      endif()
      message(STATUS \"Installing: \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/\${file}\")
      file(WRITE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/\${file}\" \"\${text}\")
    endforeach()")
endforeach()
install(EXPORT oscarTargets NAMESPACE oscar:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/oscarConfig.cmake.in
  ${PROJECT_BINARY_DIR}/oscarConfig.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/oscarConfig.cmake ${PROJECT_BINARY_DIR}/oscarConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
