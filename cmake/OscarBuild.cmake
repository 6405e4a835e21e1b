# Compiler settings shared by all targets: ccache, warnings, hardening, sanitizers, exact floating
# point.

find_program(OSCAR_CCACHE ccache)
if(OSCAR_CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${OSCAR_CCACHE})
  # Precompiled headers are cached only when their defines and time stamps may differ.
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
        CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${OSCAR_CCACHE})
  endif()
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${OSCAR_CCACHE})
endif()

# Settings of our own C++ sources; never inherited by users of the installed package.
function(oscar_target_settings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -ffp-contract=off>
    # g++ 12 reports overlaps and overflows inside std::string that are none.
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict -Wno-stringop-overflow -Wno-array-bounds>)
  if(CMAKE_UNITY_BUILD)  # g++ takes a source that stands in another one for a header
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
  # Hardened, as distributions build: sanitizers check more than fortified calls would.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong>)
  if(NOT OSCAR_SANITIZE)
    set(fortify "$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>")
    target_compile_options(${target} PRIVATE
      "$<${fortify}:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
  endif()
  target_link_options(${target} PRIVATE -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack)
  if(OSCAR_DEVELOPER)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  if(OSCAR_SANITIZE)
    string(REPLACE ";" "," sanitizers "${OSCAR_SANITIZE}")
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
    target_link_options(${target} PUBLIC -fsanitize=${sanitizers})
  endif()
endfunction()

# Precompiled headers of another target for a program.
function(oscar_reuse_headers program target)
  target_precompile_headers(${program} REUSE_FROM ${target})
  target_compile_options(${program} PRIVATE -fPIC)  # as the headers were compiled
endfunction()

# A static library of all .cpp files in the given folders.
function(oscar_library target)
  set(sources "")
  foreach(folder IN LISTS ARGN)
    file(GLOB found CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND sources ${found})
  endforeach()
  add_library(${target} STATIC ${sources})
  add_library(oscar::${target} ALIAS ${target})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib> $<INSTALL_INTERFACE:include>)
  oscar_target_settings(${target})
endfunction()

# Lets sources of a library call the CUDA kernels. Only such sources see CUDA, so that
# builds with and without it compile all others alike.
function(oscar_use_kernels target)
  if(NOT OSCAR_WITH_CUDA)
    return()
  endif()
  target_link_libraries(${target} PRIVATE $<LINK_ONLY:oscar_kernels>)
  foreach(source IN LISTS ARGN)
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_DEFINITIONS OSCAR_HAS_KERNELS=1)
    foreach(used oscar_kernels CUDA::cudart_static)
      set_property(SOURCE ${source} APPEND PROPERTY
        INCLUDE_DIRECTORIES $<TARGET_PROPERTY:${used},INTERFACE_INCLUDE_DIRECTORIES>)
    endforeach()
  endforeach()
endfunction()

# The source that names this build. Each build runs the step, which writes the file only when the
# commit is another one.
function(oscar_version_source target)
  set(output ${PROJECT_BINARY_DIR}/generated/version.cpp)
  add_custom_target(oscar_version BYPRODUCTS ${output} VERBATIM
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DOUTPUT=${output}
            -DVERSION=${PROJECT_VERSION} -P ${PROJECT_SOURCE_DIR}/cmake/OscarVersion.cmake)
  target_sources(${target} PRIVATE ${output})
  set_source_files_properties(${output} PROPERTIES GENERATED ON SKIP_PRECOMPILE_HEADERS ON)
  add_dependencies(${target} oscar_version)
endfunction()
