# Compiler settings shared by all targets: ccache, warnings, sanitizers, exact floating point.

find_program(OSCAR_CCACHE ccache)
if(OSCAR_CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${OSCAR_CCACHE})
  # Precompiled headers are cached only when their defines and time stamps may differ.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${OSCAR_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${OSCAR_CCACHE})
endif()

# Settings of our own C++ sources; never inherited by users of the installed package.
function(oscar_target_settings target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -ffp-contract=off>
    # g++ 12 reports overlaps and overflows inside std::string that are none.
    $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict -Wno-stringop-overflow -Wno-array-bounds>)
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
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/lib>
    $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/generated> $<INSTALL_INTERFACE:include>)
  oscar_target_settings(${target})
endfunction()

execute_process(COMMAND git -C ${PROJECT_SOURCE_DIR} describe --always --dirty
  OUTPUT_VARIABLE OSCAR_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT OSCAR_COMMIT)
  set(OSCAR_COMMIT "unknown")
endif()
