// Kernels of the rest of a layer: rows of a table, products of matrices, norms, activations.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "internal_kernels.h"

namespace {

using internal_kernels::Kernel;
using internal_kernels::View;
using internal_kernels::Views;

// Inputs: a table [rows, width], row numbers; rows that it does not have are left out.
bool Gather(const Views& in, const Views& out)
{
    const size_t width = in[0].count / in[0].shape[0] * in[0].Bytes();
    for (int64_t i = 0; i < in[1].count; i++) {
        const auto row = static_cast<int64_t>(in[1].Get(i));
        if (row >= 0 && row < in[0].shape[0]) std::memcpy(out[0].data + i * width, in[0].data + row * width, width);
    }
    return true;
}

// y = x W^T with W [N, K], summed in float32, as all linear cells of Llama; plus a bias [N] where MindSpore made one
// operator of a product and an addition, as it does in float16.
bool MatMul(const Views& in, const Views& out)
{
    const int64_t inputs = in[0].shape.back(), rows = in[0].count / inputs, outputs = in[1].shape[0];
    const bool hasBias = in.size() > 2 && in[2].count == outputs;
    if (in[1].shape[1] != inputs) return false;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t column = 0; column < outputs; column++) {
            float sum = 0;
            for (int64_t k = 0; k < inputs; k++) {
                sum += static_cast<float>(in[0].Get(row * inputs + k)) *
                    static_cast<float>(in[1].Get(column * inputs + k));
            }
            out[0].Set(row * outputs + column, hasBias ? sum + in[2].Get(column) : sum);
        }
    }
    return true;
}

// Inputs: x1, x2, gamma. Outputs: the norm of x1 + x2 times gamma, the factors (left alone), x1 + x2.
bool AddRmsNorm(const Views& in, const Views& out)
{
    constexpr double kEpsilon = 1e-5;  // Llama's; the kernel keeps it where its launch does not show it.
    const int64_t width = in[2].count;
    for (int64_t first = 0; first < in[0].count; first += width) {
        double squares = 0;
        for (int64_t i = first; i < first + width; i++) {
            out[2].Set(i, in[0].Get(i) + in[1].Get(i));
            squares += out[2].Get(i) * out[2].Get(i);
        }
        const double factor = 1 / std::sqrt(squares / width + kEpsilon);
        for (int64_t i = 0; i < width; i++) out[0].Set(first + i, out[2].Get(first + i) * factor * in[2].Get(i));
    }
    return true;
}

// Over the last axis.
bool Softmax(const Views& in, const Views& out)
{
    const int64_t width = in[0].shape.back();
    for (int64_t first = 0; first < in[0].count; first += width) {
        double top = in[0].Get(first), sum = 0;
        for (int64_t i = first; i < first + width; i++) top = std::max(top, in[0].Get(i));
        for (int64_t i = first; i < first + width; i++) sum += std::exp(in[0].Get(i) - top);
        for (int64_t i = first; i < first + width; i++) out[0].Set(i, std::exp(in[0].Get(i) - top) / sum);
    }
    return true;
}

bool Swish(const Views& in, const Views& out)
{
    for (int64_t i = 0; i < out[0].count; i++) {
        const double x = in[0].Get(i);
        out[0].Set(i, x / (1 + std::exp(-x)));
    }
    return true;
}

const Kernel kernels[] = {
    {"AddRmsNorm", AddRmsNorm},
    {"Gather", Gather},
    {"MatMul", MatMul},
    {"Matmul", MatMul},
    {"Softmax", Softmax},
    {"Swish", Swish},
};

}  // namespace
