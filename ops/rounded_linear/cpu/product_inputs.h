// Several products with one x in a call: x, then of each its weight, pool, ranks and scales, then indices, then of each
// its bias or of none, then of each its y. See ../README.md.
#pragma once

#include "multi_lora_linear/cpu/adapters.h"

namespace mindlora {

template <int kProducts, int kWeightTensors>
struct ProductInputs {
    static constexpr int kX = 0, kEach = kWeightTensors + 3, kIndices = 1 + kProducts * kEach, kBias = kIndices + 1;

    static constexpr int Weight(int product) { return 1 + product * kEach; }
    static constexpr int Pool(int product) { return Weight(product) + kWeightTensors; }
};

// The shapes and the types of the outputs, as MindSpore has them of one and of several.
template <int kProducts>
auto ShapesOfOutputs(const std::vector<std::vector<int64_t>>& shapes)
{
    if constexpr (kProducts == 1) {
        return shapes[0];
    } else {
        return shapes;
    }
}

template <int kProducts>
auto TypesOfOutputs(int type)
{
    if constexpr (kProducts == 1) {
        return type;
    } else {
        return std::vector<int>(kProducts, type);
    }
}

// Exports an operator from its templates Infer<kProducts> and Run<kProducts>.
#define MINDLORA_EXPORT_PRODUCTS(name, products)                                                                      \
    MINDLORA_EXPORT auto name##InferShape(int* ndims, int64_t** shapes, AotExtra*)                                    \
    {                                                                                                                 \
        return ::mindlora::ShapesOfOutputs<products>(::mindlora::Infer<products>(ndims, shapes));                     \
    }                                                                                                                 \
    MINDLORA_EXPORT auto name##InferType(std::vector<int> types, AotExtra*)                                           \
    {                                                                                                                 \
        return ::mindlora::TypesOfOutputs<products>(types[0]);                                                        \
    }                                                                                                                 \
    MINDLORA_EXPORT int name(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*) \
    {                                                                                                                 \
        return ::mindlora::Run<products>(count, data, ndims, shapes, dtypes);                                         \
    }

}  // namespace mindlora
