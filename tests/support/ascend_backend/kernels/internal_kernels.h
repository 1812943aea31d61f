// The kernels that come with MindSpore (rotary embedding, paged attention, cache writes, products of inference) are
// code for the NPU. Their own checks and plans run; in place of the launch, these tests compute what the kernels mean.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../device/elements.h"

namespace internal_kernels {

// An input or output, in memory of the process.
struct View {
    char* data;
    int type;  // CANN's number
    std::vector<int64_t> shape;
    int64_t count;

    size_t Bytes() const { return device::BytesOf(type); }
    double Get(int64_t element) const { return device::Read(data + element * Bytes(), type); }
    void Set(int64_t element, double value) const { device::Write(data + element * Bytes(), type, value); }
};

using Views = std::vector<View>;
// Returns whether it could compute this.
using Compute = bool (*)(const Views& in, const Views& out);

// Makes a kernel known, by MindSpore's name.
struct Kernel {
    Kernel(const char* name, Compute compute);
};

Compute ComputationOf(const std::string& name);

// How the rotary embedding that is being computed turns a head: MindSpore's cos_format.
int RotaryFormat();

// The lengths that MindSpore takes from the graph's input of this name, such as batch_valid_length; empty: none.
std::vector<int64_t> Lengths(const char* name);

}  // namespace internal_kernels
