// For ctypes: kernels by name, and one C function that runs them. model.py calls it.
#pragma once

#include "launch.h"

namespace ascendc_model {

using KernelCall = std::function<void(const std::vector<uint8_t*>&)>;

inline std::map<std::string, KernelCall>& Kernels()
{
    static std::map<std::string, KernelCall> kernels;
    return kernels;
}

template <class... Args, size_t... Index>
KernelCall MakeCall(void (*kernel)(Args...), std::index_sequence<Index...>)
{
    return [kernel](const std::vector<uint8_t*>& args) {
        if (args.size() != sizeof...(Args)) {
            Refuse("launch", "the kernel takes ", sizeof...(Args), " addresses, the launch passes ", args.size());
        }
        kernel(args[Index]...);
    };
}

template <class... Args>
bool RegisterKernel(const char* name, void (*kernel)(Args...))
{
    Kernels()[name] = MakeCall(kernel, std::index_sequence_for<Args...>());
    return true;
}

}  // namespace ascendc_model

#define ASCENDC_MODEL_KERNEL(kernel) \
    static const bool kernel##Registered [[maybe_unused]] = ::ascendc_model::RegisterKernel(#kernel, kernel)

extern "C" {

struct AscendcModelBuffer {
    const char* name;
    void* data;
    uint64_t bytes;
    int32_t access;  // GmAccess
};

// Runs a kernel with the buffers' addresses as arguments, the tiling's last where there is one. Writes the report as
// JSON and returns its length; a report that does not fit is cut off.
inline __attribute__((used)) uint64_t ascendc_model_run(const char* kernel, const AscendcModelBuffer* buffers,
    uint32_t bufferCount, const void* tiling, uint64_t tilingBytes, uint32_t blocks, int32_t kernelType,
    int32_t autoSync, uint64_t tilingKey, char* json, uint64_t jsonBytes)
{
    using namespace ascendc_model;
    Report report;
    const auto found = Kernels().find(kernel);
    if (found == Kernels().end()) {
        report.error = Text("no kernel ", kernel);
    } else {
        Launch launch;
        launch.options = {blocks, static_cast<KernelMetaType>(kernelType), autoSync != 0, tilingKey};
        std::vector<uint8_t*> args;
        for (uint32_t i = 0; i < bufferCount; ++i) {
            args.push_back(buffers[i].data == nullptr ? nullptr
                                                      : launch.Gm(buffers[i].name, buffers[i].data, buffers[i].bytes,
                                                            static_cast<GmAccess>(buffers[i].access)));
        }
        if (tilingBytes != 0) {
            args.push_back(launch.Gm("tiling", const_cast<void*>(tiling), tilingBytes, GmAccess::kInput));
        }
        report = launch.Run([&] { found->second(args); });
    }
    const std::string text = report.Json();
    const uint64_t length = std::min<uint64_t>(text.size(), jsonBytes - 1);
    std::memcpy(json, text.data(), length);
    json[length] = 0;
    return text.size();
}

}  // extern "C"
