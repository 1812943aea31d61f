// CANN's operators that are called by name (aclop): those that MindSpore puts between others, which move values.
#include <cstring>
#include <string>
#include <unordered_map>

#include "arithmetic.h"

namespace {

using device::Buffer;
using device::Description;
using device::Index;

struct Tensors {
    std::vector<const Description*> descriptions;
    std::vector<const Buffer*> buffers;

    Tensors(int count, void* const* descriptions, void* const* buffers)
        : descriptions(reinterpret_cast<const Description* const*>(descriptions),
              reinterpret_cast<const Description* const*>(descriptions) + count),
          buffers(
              reinterpret_cast<const Buffer* const*>(buffers), reinterpret_cast<const Buffer* const*>(buffers) + count)
    {}

    char* Data(int number) const { return static_cast<char*>(buffers[number]->data); }

    size_t Bytes(int number) const
    {
        size_t bytes = device::BytesOf(descriptions[number]->type);
        for (int64_t size : descriptions[number]->shape) bytes *= size;
        return bytes;
    }
};

void Zeros(const Tensors&, const Tensors& out) { std::memset(out.Data(0), 0, out.Bytes(0)); }

void Copy(const Tensors& in, const Tensors& out) { std::memcpy(out.Data(0), in.Data(0), out.Bytes(0)); }

void Assign(const Tensors& in, const Tensors& out)
{
    std::memcpy(in.Data(0), in.Data(1), out.Bytes(0));
    std::memcpy(out.Data(0), in.Data(1), out.Bytes(0));
}

// Inputs: x, where the slice begins, its sizes.
void Slice(const Tensors& in, const Tensors& out)
{
    const Description& x = *in.descriptions[0];
    const size_t bytes = device::BytesOf(x.type);
    const int type = in.descriptions[1]->type;
    char* target = out.Data(0);
    device::ForEach(out.descriptions[0]->shape, [&](const Index& index) {
        int64_t element = 0;
        for (size_t axis = 0; axis < index.size(); axis++) {
            const auto begin = static_cast<int64_t>(device::Read(in.Data(1) + axis * device::BytesOf(type), type));
            element = element * x.shape[axis] + begin + index[axis];
        }
        std::memcpy(target, in.Data(0) + element * bytes, bytes);
        target += bytes;
    });
}

// Inputs: the axis, x of one axis.
void Split(const Tensors& in, const Tensors& out)
{
    const char* source = in.Data(1);
    for (size_t part = 0; part < out.buffers.size(); part++) {
        std::memcpy(out.Data(part), source, out.Bytes(part));
        source += out.Bytes(part);
    }
}

bool Compute(const std::string& type, const Tensors& in, const Tensors& out)
{
    static const std::unordered_map<std::string, void (*)(const Tensors&, const Tensors&)> known = {{"Assign", Assign},
        {"Identity", Copy}, {"Slice", Slice}, {"Split", Split}, {"TensorMove", Copy}, {"ZerosLike", Zeros}};
    const auto found = known.find(type);
    if (found == known.end() || (type == "Split" && in.descriptions[1]->shape.size() != 1)) return false;
    found->second(in, out);
    return true;
}

int Run(const char* type, int inputs, void* const* in, void* const* inBuffers, int outputs, void* const* out,
    void* const* outBuffers)
{
    const Tensors read(inputs, in, inBuffers), written(outputs, out, outBuffers);
    const bool computed = Compute(type, read, written);
    std::vector<aclTensor> tensors;
    for (const Tensors* side : {&read, &written}) {
        for (const Description* known : side->descriptions)
            tensors.push_back({known->type, known->shape, nullptr, {}, 0});
    }
    std::vector<const aclTensor*> logged;
    for (const aclTensor& tensor : tensors) logged.push_back(&tensor);
    device::Log(type, computed, logged);
    return 0;
}

}  // namespace

extern "C" {

int aclopCompileAndExecute(const char* type, int inputs, void* const* in, void* const* inBuffers, int outputs,
    void* const* out, void* const* outBuffers, void*, int, int, const char*, void*)
{
    return Run(type, inputs, in, inBuffers, outputs, out, outBuffers);
}

int aclopCompileAndExecuteV2(const char* type, int inputs, void* const* in, void* const* inBuffers, int outputs,
    void* const* out, void* const* outBuffers, void*, int, int, const char*, void*)
{
    return Run(type, inputs, in, inBuffers, outputs, out, outBuffers);
}
}
