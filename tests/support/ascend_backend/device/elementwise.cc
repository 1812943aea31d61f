// Operators that compute each element from elements at the same place.
#include <cmath>

#include "arithmetic.h"

namespace {

using device::Compute;
using device::Executor;
using device::Index;
using device::Operator;

// y = f(x)
Compute Unary(double (*f)(double))
{
    return [f](Executor& executor) {
        const aclTensor& x = *executor.tensors[0];
        const aclTensor& y = *executor.tensors[1];
        device::ForEach(y.shape, [&](const Index& index) { device::Put(y, index, f(device::Get(x, index))); });
    };
}

// z = f(x, y, alpha); alpha is 1 where the operator has none.
Compute Binary(double (*f)(double, double, double))
{
    return [f](Executor& executor) {
        const aclTensor& x = *executor.tensors[0];
        const aclTensor& y = *executor.tensors[1];
        const aclTensor& z = *executor.tensors.back();
        double alpha = 1;
        if (executor.arguments.size() > 3) alpha = reinterpret_cast<device::Scalar*>(executor.arguments[2])->value;
        device::ForEach(z.shape,
            [&](const Index& index) { device::Put(z, index, f(device::Get(x, index), device::Get(y, index), alpha)); });
    };
}

// The tensor itself becomes a number.
Compute Fill(double value)
{
    return [value](Executor& executor) {
        const aclTensor& y = *executor.tensors[0];
        device::ForEach(y.shape, [&](const Index& index) { device::Put(y, index, value); });
    };
}

void MultiplyByScalar(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& y = *executor.tensors[1];
    const double scalar = reinterpret_cast<device::Scalar*>(executor.arguments[1])->value;
    device::ForEach(y.shape, [&](const Index& index) { device::Put(y, index, device::Get(x, index) * scalar); });
}

void Copy(Executor& executor)
{
    const aclTensor& y = *executor.tensors[0];
    const aclTensor& x = *executor.tensors[1];
    device::ForEach(y.shape, [&](const Index& index) { device::Put(y, index, device::Get(x, index)); });
}

const Operator operators[] = {
    {"aclnnAdd", Binary([](double x, double y, double alpha) { return x + alpha * y; })},
    {"aclnnSub", Binary([](double x, double y, double alpha) { return x - alpha * y; })},
    {"aclnnMul", Binary([](double x, double y, double) { return x * y; })},
    {"aclnnDiv", Binary([](double x, double y, double) { return x / y; })},
    {"aclnnMuls", MultiplyByScalar},
    {"aclnnCast", Unary([](double x) { return x; })},
    {"aclnnExp", Unary([](double x) { return std::exp(x); })},
    {"aclnnNeg", Unary([](double x) { return -x; })},
    {"aclnnReciprocal", Unary([](double x) { return 1 / x; })},
    {"aclnnRsqrt", Unary([](double x) { return 1 / std::sqrt(x); })},
    {"aclnnSilu", Unary([](double x) { return x / (1 + std::exp(-x)); })},
    {"aclnnSqrt", Unary([](double x) { return std::sqrt(x); })},
    {"aclnnInplaceCopy", Copy},
    {"aclnnInplaceOne", Fill(1)},
    {"aclnnInplaceZero", Fill(0)},
};

}  // namespace
