// The kernels' calls in PyNative as a Python module: MindSpore's AclnnOpRunner hands the tensors straight to aclnn<Op>.
// For MindSpore 2.9 and newer. mindlora/ops/ascend.py builds and loads it; graph mode has ops.Custom.
#include <dlfcn.h>

#include "ms_extension/api.h"

namespace mindlora {
namespace {

using ms::Tensor;

// Raised when a function gets other arguments or another meaning; mindlora/ops/ascend.py compares it.
constexpr int kVersion = 1;

// The CPU library, which infers shapes here as it does for ops.Custom, so that all refuse the same in the same words.
void* library = nullptr;

void UseLibrary(const std::string& path)
{
    library = dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) throw std::runtime_error(dlerror());
}

std::vector<int64_t> ShapeOfOutput(const std::string& op, const std::vector<Tensor>& inputs)
{
    // As ops/cpu_common/aot.h has it.
    using InferShape = std::vector<int64_t> (*)(int* ndims, int64_t** shapes, void* extra);
    const auto infer = reinterpret_cast<InferShape>(dlsym(library, (op + "InferShape").c_str()));
    if (infer == nullptr) throw std::runtime_error("mindlora: the CPU library has no " + op + "InferShape.");
    std::vector<std::vector<int64_t>> shapes;
    std::vector<int64_t*> starts;
    std::vector<int> ndims;
    for (const Tensor& input : inputs) shapes.emplace_back(input.shape());
    for (auto& shape : shapes) {
        starts.push_back(shape.data());
        ndims.push_back(static_cast<int>(shape.size()));
    }
    return infer(ndims.data(), starts.data(), nullptr);
}

// One call: inputs in the kernel's order and an output of the dtype of `like`.
// A view is passed with its strides, and CANN copies it (AutoContiguous in host.h).
class Call {
public:
    Call(const char* op, const std::vector<Tensor>& inputs, const Tensor& like)
        : op_(op), inputs_(inputs), output_(like.data_type(), ShapeOfOutput(op, inputs))
    {}

    const Tensor& output() const { return output_; }

    Tensor Run(const ms::pynative::AclnnOpRunner::AclnnLaunchFunc& launch)
    {
        const auto runner = std::make_shared<ms::pynative::AclnnOpRunner>(op_);
        runner->SetLaunchFunc(launch);
        runner->Run(inputs_, {output_});
        return output_;
    }

private:
    std::string op_;
    std::vector<Tensor> inputs_;
    Tensor output_;
};

Tensor LoraDelta(const Tensor& y0, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& scale)
{
    Call call("LoraDelta", {y0, x, a, b, scale}, y0);
    return call.Run(LAUNCH_ACLNN_FUNC(aclnnLoraDelta, y0, x, a, b, scale, call.output()));
}

Tensor LoraLinear(
    const Tensor& x, const Tensor& w, const Tensor& a, const Tensor& b, const Tensor& scale, const Tensor& bias)
{
    Call call("LoraLinear", {x, w, a, b, scale, bias}, x);
    return call.Run(LAUNCH_ACLNN_FUNC(aclnnLoraLinear, x, w, a, b, scale, bias, call.output()));
}

Tensor MultiLoraDelta(const Tensor& y0, const Tensor& x, const Tensor& pool, const Tensor& ranks, const Tensor& scales,
    const Tensor& indices)
{
    Call call("MultiLoraDelta", {y0, x, pool, ranks, scales, indices}, y0);
    return call.Run(LAUNCH_ACLNN_FUNC(aclnnMultiLoraDelta, y0, x, pool, ranks, scales, indices, call.output()));
}

// Writes into pool, ranks and scales: CANN's call takes each of them once, though they are outputs too.
Tensor MultiLoraSlotWrite(const Tensor& pool, const Tensor& ranks, const Tensor& scales, const Tensor& slot,
    const Tensor& packed, const Tensor& scale)
{
    Call call("MultiLoraSlotWrite", {pool, ranks, scales, slot, packed, scale}, slot);
    return call.Run(
        LAUNCH_ACLNN_FUNC(aclnnMultiLoraSlotWrite, pool, ranks, scales, slot, packed, scale, call.output()));
}

Tensor Nf4Dequantize(
    const Tensor& like, const Tensor& codes, const Tensor& absmax, const Tensor& scales, const Tensor& offsets)
{
    Call call("Nf4Dequantize", {like, codes, absmax, scales, offsets}, like);
    return call.Run(LAUNCH_ACLNN_FUNC(aclnnNf4Dequantize, like, codes, absmax, scales, offsets, call.output()));
}

}  // namespace
}  // namespace mindlora

PYBIND11_MODULE(MS_EXTENSION_NAME, m)
{
    m.attr("version") = mindlora::kVersion;
    m.def("use_library", &mindlora::UseLibrary);
    m.def("LoraDelta", PYBOOST_CALLER(1, mindlora::LoraDelta));
    m.def("LoraLinear", PYBOOST_CALLER(1, mindlora::LoraLinear));
    m.def("MultiLoraDelta", PYBOOST_CALLER(1, mindlora::MultiLoraDelta));
    m.def("MultiLoraSlotWrite", PYBOOST_CALLER(1, mindlora::MultiLoraSlotWrite));
    m.def("Nf4Dequantize", PYBOOST_CALLER(1, mindlora::Nf4Dequantize));
}
