// Device and precision, and a look at the driver before "auto" settles for the CPU.
#include "oscar/model/compute.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "oscar/base/error.h"

namespace oscar {
namespace {

// First line of the loaded NVIDIA driver's version file, if a driver is loaded.
std::optional<std::string> nvidia_driver() {
  std::ifstream stream("/proc/driver/nvidia/version");
  std::string line;
  if (!std::getline(stream, line)) return std::nullopt;
  return line;
}

// Devices that libtorch can use. The half of libtorch that drives them, 350 MiB of memory and a
// quarter of a program's start, is loaded where there is a driver for it, and before anything asks
// torch for a device: torch remembers whether it was there.
int cuda_device_count() {
  if (dlopen("libcuda.so.1", RTLD_LAZY) == nullptr) return 0;
  dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_GLOBAL);  // a libtorch for the CPU has none
  return static_cast<int>(torch::cuda::device_count());
}

[[noreturn]] void refuse_cuda(const std::string& driver) {
  throw Error({.what = "libtorch cannot use the NVIDIA GPU",
               .where = "--device",
               .expected = fmt::format("a driver for libtorch {} built for CUDA 13", TORCH_VERSION),
               .found = driver,
               .hint = "update the driver, or run on the CPU with --device cpu"});
}

torch::Device choose_device(const std::string& device) {
  if (device == "cpu") return torch::kCPU;
  if (device != "auto" && device != "cuda" && device.rfind("cuda:", 0) != 0) {
    throw Error({.what = "unknown device",
                 .where = "--device",
                 .expected = "auto, cpu, cuda or cuda:INDEX",
                 .found = device});
  }
  const int count = cuda_device_count();
  if (count == 0) {
    if (const auto driver = nvidia_driver()) refuse_cuda(*driver);
    if (device == "auto") return torch::kCPU;
    throw Error({.what = "no CUDA device was found",
                 .where = "--device " + device,
                 .hint = "use --device cpu, or check that nvidia-smi lists the GPU"});
  }
  int index = 0;
  if (device.rfind("cuda:", 0) == 0) {
    const std::string digits = device.substr(5);
    if (digits.empty() || digits.size() > 3 ||
        digits.find_first_not_of("0123456789") != std::string::npos || std::stoi(digits) >= count) {
      throw Error({.what = "no such CUDA device",
                   .where = "--device",
                   .expected = fmt::format("cuda:0 to cuda:{}", count - 1),
                   .found = device});
    }
    index = std::stoi(digits);
  }
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace

ComputeOptions choose_compute(const std::string& device, const std::string& dtype) {
  ComputeOptions options;
  options.device = choose_device(device);
  if (dtype == "auto") {
    options.dtype = options.device.is_cuda() ? torch::kBFloat16 : torch::kFloat32;
  } else if (dtype == "bf16" || dtype == "fp32") {
    options.dtype = dtype == "bf16" ? torch::kBFloat16 : torch::kFloat32;
  } else {
    throw Error({.what = "unknown compute precision",
                 .where = "--dtype",
                 .expected = "auto, bf16 or fp32",
                 .found = dtype});
  }
  return options;
}

std::string describe(const ComputeOptions& options) {
  return fmt::format("{}, {}", options.device.str(),
                     options.dtype == torch::kBFloat16 ? "bf16" : "fp32");
}

}  // namespace oscar
