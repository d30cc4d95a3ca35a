// Lists the kernels and copies of a program that runs on a GPU of NVIDIA's, with their times, by
// CUPTI. CUDA loads this library where CUDA_INJECTION64_PATH names it. At the end of the program it
// writes a line for each to the file KVZAP_TRACE: begin and end in ns, "kernel" or "copy", a name.
// A copy's name is its direction and bytes. Tracing itself takes about 1 microsecond of each.
#include <cupti.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Event {
  std::uint64_t begin, end;
  bool is_kernel;
  std::string name;
};

std::mutex mutex;
std::vector<Event> events;

std::string demangled(const char* name) {
  int status = 0;
  char* const found = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string text = status == 0 ? found : name;
  std::free(found);
  return text;
}

const char* direction_of(std::uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "to the device";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "to the host";
    default:
      return "other";
  }
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
  *size = std::size_t{8} << 20;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *size));
  *records = 0;
}

void CUPTIAPI take_buffer(CUcontext /*context*/, std::uint32_t /*stream*/, std::uint8_t* buffer,
                          std::size_t /*size*/, std::size_t valid) {
  const std::lock_guard<std::mutex> lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto* const kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
      events.push_back({kernel->start, kernel->end, true, kernel->name ? kernel->name : "?"});
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* const copy = reinterpret_cast<const CUpti_ActivityMemcpy5*>(record);
      events.push_back({copy->start, copy->end, false,
                        std::string(direction_of(copy->copyKind)) + ", " +
                            std::to_string(copy->bytes) + " bytes"});
    }
  }
  std::free(buffer);
}

void write_all() {
  cuptiActivityFlushAll(1);
  const char* const path = std::getenv("KVZAP_TRACE");
  std::FILE* const file = path ? std::fopen(path, "w") : nullptr;
  if (!file) {
    std::fputs("trace: KVZAP_TRACE names no file that can be written\n", stderr);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Event& event : events) {
    const std::string name = event.is_kernel ? demangled(event.name.c_str()) : event.name;
    std::fprintf(file, "%llu\t%llu\t%s\t%s\n", static_cast<unsigned long long>(event.begin),
                 static_cast<unsigned long long>(event.end), event.is_kernel ? "kernel" : "copy",
                 name.c_str());
  }
  std::fclose(file);
}

}  // namespace

extern "C" int InitializeInjection();
// CUDA calls this.
extern "C" int InitializeInjection() {
  if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS ||
      cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS ||
      cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY) != CUPTI_SUCCESS) {
    std::fputs("trace: CUPTI cannot list kernels here\n", stderr);
    return 0;
  }
  std::atexit(write_all);
  return 1;
}
