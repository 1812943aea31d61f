// Takes the place of MindSpore's launch of its own kernels: this library is loaded before theirs.
#include "internal_kernels.h"

#include <dlfcn.h>

#include <cstdio>
#include <memory>
#include <unordered_map>

#include "../device/device.h"

namespace mindspore::internal {

// As MindSpore's library has it, as far as it is read here.
struct ArgImmutableInfo {
    int type;
    int format;
};
using Argument = ArgImmutableInfo;

enum InternalStatus { kInternalOk = 0 };

struct ApplyRotaryPosEmbParam {
    int32_t cosFormat;
    int32_t rotaryCoefficient;
};

class InternalOp {
public:
    virtual InternalStatus Launch(const std::vector<void*>& in, const std::vector<void*>& out,
        const std::vector<void*>& workspace, void* stream, const std::string& name);

    std::vector<Argument> inputs, outputs;
    std::vector<std::vector<int64_t>> inputShapes, outputShapes;
    std::string name;
};

std::shared_ptr<InternalOp> CreateApplyRotaryPosEmbOp(const std::vector<ArgImmutableInfo>& in,
    const std::vector<ArgImmutableInfo>& out, const ApplyRotaryPosEmbParam& parameter, const std::string& name);

}  // namespace mindspore::internal

namespace {

using internal_kernels::View;
using internal_kernels::Views;
using mindspore::internal::Argument;

std::unordered_map<std::string, internal_kernels::Compute>& Known()
{
    static auto* known = new std::unordered_map<std::string, internal_kernels::Compute>;
    return *known;
}

// The cos_format of each rotary embedding that MindSpore made, and of the one that is being computed.
std::unordered_map<const void*, int> rotaryFormats;
thread_local int rotaryFormat = 0;

// CANN's number of a dtype, from that of these kernels.
int TypeOf(int type)
{
    static const int numbers[] = {-1, 1, 0, 11, 2, 6, 3, 9, 4, 7, 8, 10, 27, 12};
    return type >= 0 && type < static_cast<int>(sizeof(numbers) / sizeof(numbers[0])) ? numbers[type] : -1;
}

Views ViewsOf(const std::vector<Argument>& arguments, const std::vector<std::vector<int64_t>>& shapes,
    const std::vector<void*>& addresses)
{
    Views views;
    for (size_t i = 0; i < shapes.size() && i < addresses.size(); i++) {
        int64_t count = shapes[i].empty() ? 0 : 1;
        for (int64_t size : shapes[i]) count *= size;
        const int type = i < arguments.size() ? TypeOf(arguments[i].type) : -1;
        views.push_back({static_cast<char*>(addresses[i]), type, shapes[i], count});
    }
    return views;
}

}  // namespace

internal_kernels::Kernel::Kernel(const char* name, Compute compute) { Known()[name] = compute; }

internal_kernels::Compute internal_kernels::ComputationOf(const std::string& name)
{
    const auto found = Known().find(name);
    return found == Known().end() ? nullptr : found->second;
}

int internal_kernels::RotaryFormat() { return rotaryFormat; }

// A launch does not show the parameters of its kernel, so this one notes the format where the kernel is made.
std::shared_ptr<mindspore::internal::InternalOp> mindspore::internal::CreateApplyRotaryPosEmbOp(
    const std::vector<ArgImmutableInfo>& in, const std::vector<ArgImmutableInfo>& out,
    const ApplyRotaryPosEmbParam& parameter, const std::string& name)
{
    static const auto make = reinterpret_cast<decltype(&CreateApplyRotaryPosEmbOp)>(
        dlsym(dlopen("libms_kernels_internal.so", RTLD_NOW | RTLD_NOLOAD),
            "_ZN9mindspore8internal25CreateApplyRotaryPosEmbOpERKSt6vectorINS0_16ArgImmutableInfoESaIS2_EES6_"
            "RKNS0_22ApplyRotaryPosEmbParamERKSs"));
    std::shared_ptr<InternalOp> kernel = make(in, out, parameter, name);
    rotaryFormats[kernel.get()] = parameter.cosFormat;
    return kernel;
}

std::vector<int64_t> internal_kernels::Lengths(const char* name)
{
    static void* const core = dlopen("libmindspore_core.so", RTLD_NOW | RTLD_NOLOAD);
    static const auto function = [](const char* mangled) { return core == nullptr ? nullptr : dlsym(core, mangled); };
    static const auto instance = reinterpret_cast<void* (*)()>(function("_ZN9mindspore10LLMManager11GetInstanceEv"));
    static const auto input = reinterpret_cast<std::shared_ptr<void> (*)(void*, const std::string&)>(
        function("_ZN9mindspore10LLMManager15get_graph_inputERKSs"));
    static const auto data = reinterpret_cast<void* (*)(void*)>(function("_ZNK9mindspore6tensor6Tensor6data_cEv"));
    static const auto shape =
        reinterpret_cast<const std::vector<int64_t>& (*)(void*)>(function("_ZNK9mindspore6tensor6Tensor7shape_cEv"));
    if (instance == nullptr || input == nullptr || data == nullptr || shape == nullptr) {
        std::fprintf(stderr, "stand-in for CANN: MindSpore's LLMManager cannot be asked for lengths\n");
        return {};
    }
    const std::shared_ptr<void> tensor = input(instance(), name);
    const auto* values = tensor ? static_cast<const int32_t*>(data(tensor.get())) : nullptr;
    if (values == nullptr) return {};
    int64_t count = 1;
    for (int64_t size : shape(tensor.get())) count *= size;
    return {values, values + count};
}

mindspore::internal::InternalStatus mindspore::internal::InternalOp::Launch(
    const std::vector<void*>& in, const std::vector<void*>& out, const std::vector<void*>&, void*, const std::string&)
{
    Views read = ViewsOf(inputs, inputShapes, in);
    const Views written = ViewsOf(outputs, outputShapes, out);
    // Its shapes leave out the lengths and its addresses do not: the mask is the eighth of MindSpore's inputs.
    if (name == "PagedAttention" && in.size() > 7 && read.size() > 4 && read[4].count > 0) {
        read[4].data = static_cast<char*>(in[7]);
    }
    const auto format = rotaryFormats.find(this);
    rotaryFormat = format == rotaryFormats.end() ? 0 : format->second;
    const internal_kernels::Compute compute = internal_kernels::ComputationOf(name);
    const bool computed = compute != nullptr && compute(read, written);
    std::vector<aclTensor> tensors;
    for (const Views* side : {static_cast<const Views*>(&read), &written}) {
        for (const View& view : *side) tensors.push_back({view.type, view.shape, view.data, {}, 0});
    }
    std::vector<const aclTensor*> logged;
    for (const aclTensor& tensor : tensors) logged.push_back(&tensor);
    device::Log(name, computed, logged);
    return kInternalOk;
}
