// Operators of routed experts: the order of numbers, rows in the order of their experts, and products of each expert.
#include <algorithm>
#include <numeric>

#include "arithmetic.h"

namespace {

using device::Executor;
using device::Index;
using device::Operator;

// The first numbers of each row in order, as many as `values` has, and their places in the row.
void Order(const aclTensor& x, const aclTensor& values, const aclTensor& places, bool descends)
{
    Index rows = x.shape;
    rows.back() = 1;
    device::ForEach(rows, [&](const Index& row) {
        Index index = row;
        const auto value = [&](int64_t place) {
            index.back() = place;
            return device::Get(x, index);
        };
        std::vector<int64_t> order(x.shape.back());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t first, int64_t second) {
            return descends ? value(first) > value(second) : value(first) < value(second);
        });
        for (int64_t i = 0; i < values.shape.back(); i++) {
            const double chosen = value(order[i]);
            index.back() = i;
            device::Put(values, index, chosen);
            device::Put(places, index, order[i]);
        }
    });
}

void TopK(Executor& executor) { Order(*executor.tensors[0], *executor.tensors[1], *executor.tensors[2], true); }

// Arguments: x, stable, axis, whether it descends, values, places.
void Sort(Executor& executor)
{
    const bool descends = (executor.arguments[3] & 1) != 0;
    Order(*executor.tensors[0], *executor.tensors[1], *executor.tensors[2], descends);
}

// Tensors: x [tokens, width], experts [tokens, k]. Outputs: the rows of x in the order of their experts, the row of
// each token's j-th expert, and how many rows each expert has.
void MoeInitRouting(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& experts = *executor.tensors[1];
    const aclTensor& rows = *executor.tensors[2];
    const aclTensor& places = *executor.tensors[3];
    const aclTensor& counts = *executor.tensors[4];
    const int64_t k = experts.shape[1];
    std::vector<int64_t> order(experts.shape[0] * k);
    std::iota(order.begin(), order.end(), 0);
    const auto expert = [&](int64_t source) { return device::Get(experts, source); };
    std::stable_sort(
        order.begin(), order.end(), [&](int64_t first, int64_t second) { return expert(first) < expert(second); });
    device::ForEach(counts.shape, [&](const Index& index) { device::Put(counts, index, 0); });
    for (int64_t row = 0; row < static_cast<int64_t>(order.size()); row++) {
        const Index of = {static_cast<int64_t>(expert(order[row]))};
        device::Put(counts, of, device::Get(counts, of) + 1);
        device::Put(places, {order[row]}, row);
        for (int64_t i = 0; i < x.shape[1]; i++) device::Put(rows, {row, i}, device::Get(x, {order[row] / k, i}));
    }
}

// Tensors: x [rows, inputs], W [experts, inputs, outputs], rows of each expert, y = x W_e, summed in float32.
void GroupedMatMul(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& w = *executor.tensors[1];
    const aclTensor& counts = *executor.tensors[2];
    const aclTensor& y = *executor.tensors[3];
    int64_t row = 0;
    for (int64_t expert = 0; expert < w.shape[0]; expert++) {
        const int64_t end = row + static_cast<int64_t>(device::Get(counts, expert));
        for (; row < end; row++) {
            for (int64_t column = 0; column < y.shape[1]; column++) {
                float sum = 0;
                for (int64_t i = 0; i < x.shape[1]; i++) {
                    const auto weight = static_cast<float>(device::Get(w, {expert, i, column}));
                    sum += static_cast<float>(device::Get(x, {row, i})) * weight;
                }
                device::Put(y, {row, column}, sum);
            }
        }
    }
}

// Tensors: x [rows, width], the row of each token's j-th expert, its weight [tokens, k]; y is the weighted sum.
void MoeTokenUnpermute(Executor& executor)
{
    const aclTensor& x = *executor.tensors[0];
    const aclTensor& places = *executor.tensors[1];
    const aclTensor& weights = *executor.tensors[2];
    const aclTensor& y = *executor.tensors[3];
    const int64_t k = weights.shape[1];
    device::ForEach(y.shape, [&](const Index& index) {
        double sum = 0;
        for (int64_t j = 0; j < k; j++) {
            const auto row = static_cast<int64_t>(device::Get(places, index[0] * k + j));
            sum += device::Get(weights, {index[0], j}) * device::Get(x, {row, index[1]});
        }
        device::Put(y, index, sum);
    });
}

const Operator operators[] = {
    {"aclnnTopk", TopK},
    {"aclnnSort", Sort},
    {"aclnnMoeInitRoutingV2", MoeInitRouting},
    {"aclnnGroupedMatmulV4", GroupedMatMul},
    {"aclnnMoeTokenUnpermute", MoeTokenUnpermute},
};

}  // namespace
