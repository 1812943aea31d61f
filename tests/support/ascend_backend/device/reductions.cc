// Operators that sum over axes: products of matrices, sums, norms.
#include <cmath>
#include <unordered_map>

#include "arithmetic.h"

namespace {

using device::Executor;
using device::Index;
using device::Operator;

// y[.., i, j] = sum over k of x[.., i, k] w[.., k, j], summed in float32
void MatMul(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& w = *executor.tensors[1];
    const aclTensor& y = *executor.tensors[2];
    device::ForEach(y.shape, [&](const Index& index) {
        Index left = index, right = index;
        float sum = 0;
        for (int64_t k = 0; k < x.shape.back(); k++) {
            left[index.size() - 1] = k;
            right[index.size() - 2] = k;
            sum += static_cast<float>(device::Get(x, left)) * static_cast<float>(device::Get(w, right));
        }
        device::Put(y, index, sum);
    });
}

// y = x summed over the axes of the second argument, or over all; y has these axes with size 1, or lacks them.
void ReduceSum(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& y = *executor.tensors[1];
    const Index& axes = reinterpret_cast<device::Integers*>(executor.arguments[1])->values;
    std::vector<bool> summed(x.shape.size(), axes.empty());
    for (int64_t axis : axes) summed[axis < 0 ? axis + x.shape.size() : axis] = true;
    const bool keeps = y.shape.size() == x.shape.size();
    std::unordered_map<char*, double> sums;
    device::ForEach(x.shape, [&](const Index& index) {
        Index target;
        for (size_t axis = 0; axis < index.size(); axis++) {
            if (!summed[axis]) {
                target.push_back(index[axis]);
            } else if (keeps) {
                target.push_back(0);
            }
        }
        sums[device::At(y, target)] += device::Get(x, index);
    });
    for (const auto& [element, sum] : sums) device::Write(element, y.type, sum);
}

// y = x f gamma with f = 1 / sqrt(mean(x^2) + epsilon), over the axes of gamma's last; f is the second output.
void RmsNorm(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& gamma = *executor.tensors[1];
    const aclTensor& y = *executor.tensors[2];
    const aclTensor& factors = *executor.tensors[3];
    const int64_t width = gamma.shape.back();
    const double epsilon = executor.reals[0];
    Index rows = x.shape;
    rows.back() = 1;
    device::ForEach(rows, [&](const Index& row) {
        Index index = row;
        double sum = 0;
        for (index.back() = 0; index.back() < width; index.back()++) sum += std::pow(device::Get(x, index), 2);
        const double factor = 1 / std::sqrt(sum / width + epsilon);
        device::Put(factors, row, factor);
        for (index.back() = 0; index.back() < width; index.back()++) {
            device::Put(y, index, device::Get(x, index) * factor * device::Get(gamma, index.back()));
        }
    });
}

const Operator operators[] = {
    {"aclnnMm", MatMul},
    {"aclnnMatmul", MatMul},
    {"aclnnBatchMatMul", MatMul},
    {"aclnnReduceSum", ReduceSum},
    {"aclnnRmsNorm", RmsNorm},
};

}  // namespace
