# Finds every package once. Nothing is fetched here; scripts/setup.sh installs what is missing.

# Below the model the compiled library: header-only, a source takes half as long again to compile.
# Sources that include torch see the fmt that torch brings along, which exists as headers only.
find_package(fmt REQUIRED)
find_package(Eigen3 REQUIRED NO_MODULE)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
# Static where the system has it: Debian's shared one needs libcurl, for files in S3, and 30 libraries behind
# it, which a wheel would have to carry.
set(HDF5_USE_STATIC_LIBRARIES ON)
unset(HDF5_C_LIBRARY_hdf5 CACHE)  # where a build folder found the shared one before
find_package(HDF5 REQUIRED COMPONENTS C)
list(FILTER HDF5_C_LIBRARIES EXCLUDE REGEX "/lib(curl|crypto)\\.")
find_package(ZLIB REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
find_library(UTF8PROC_LIBRARY utf8proc REQUIRED)
find_path(UTF8PROC_INCLUDE_DIR utf8proc.h REQUIRED)
# OpenBLAS itself, not whatever libblas.so the system's alternatives point to. It holds LAPACK, and
# is opened at run time, never linked (lib/oscar/fit/linalg.cpp says why).
find_library(OPENBLAS_LIBRARY NAMES openblas libopenblas.so.0 REQUIRED)

if(OSCAR_WITH_CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

if(OSCAR_WITH_TORCH)
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  # The Python wheel of torch, used as a C++ library. Its own CMake package insists on a CUDA
  # toolkit even for programs that compile no CUDA, so the few libraries are named here.
  if(NOT OSCAR_TORCH_DIR)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -c "import torch, os; print(os.path.dirname(torch.__file__))"
      OUTPUT_VARIABLE oscar_torch_found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "torch was not found through ${Python3_EXECUTABLE}. "
        "Run scripts/setup.sh, or set OSCAR_TORCH_DIR to the folder that holds torch/lib, "
        "or build without the model programs: -DOSCAR_WITH_TORCH=OFF")
    endif()
    set(OSCAR_TORCH_DIR ${oscar_torch_found} CACHE PATH "Folder of the torch package" FORCE)
  endif()
  add_library(oscar_libtorch INTERFACE IMPORTED)
  target_include_directories(oscar_libtorch SYSTEM INTERFACE
    ${OSCAR_TORCH_DIR}/include ${OSCAR_TORCH_DIR}/include/torch/csrc/api/include)
  # Without CUDA's half, which lib/oscar/model/layer_weights.cpp loads when a device may be used.
  # libstdc++ comes first: libtorch exports a std::filesystem of its own, and its remove_all jumps
  # to a null address.
  target_link_libraries(oscar_libtorch INTERFACE
    -Wl,--no-as-needed -lstdc++ -Wl,--as-needed
    ${OSCAR_TORCH_DIR}/lib/libtorch_cpu.so ${OSCAR_TORCH_DIR}/lib/libc10.so)
  # CMAKE_INSTALL_RPATH_USE_LINK_PATH leaves out folders below the project, where scripts/setup.sh
  # puts its virtual environment.
  target_link_options(oscar_libtorch INTERFACE -Wl,-rpath,${OSCAR_TORCH_DIR}/lib)
endif()
