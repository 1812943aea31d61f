// The products of rounded_linear in one call, for W of any kind: x, then of each product its weight, pool, ranks and
// scales, then indices, then of each its bias or of none, then of each its y. See ../README.md.
#pragma once

#include <omp.h>

#include "multi_lora_linear/cpu/adapters.h"

namespace mindlora {

constexpr char kRoundedLinear[] = "rounded_linear";

// `Kind` has Weight, as a kernel takes it; kTensors, the inputs that it is; and for them Check, CheckDtypes and At, and
// Call, the kernel.
template <class Kind, int kProducts>
struct RoundedProducts {
    static constexpr int kX = 0, kEach = Kind::kTensors + 3, kIndices = 1 + kProducts * kEach, kBias = kIndices + 1;

    static constexpr int Weight(int product) { return 1 + product * kEach; }
    static constexpr int Pool(int product) { return Weight(product) + Kind::kTensors; }

    // Returns the shapes of the outputs.
    static std::vector<std::vector<int64_t>> Infer(const Shapes& s)
    {
        std::vector<std::vector<int64_t>> outputs;
        for (int i = 0; i < kProducts; ++i) {
            const int64_t in = s.Width(kX), out = s.At(Weight(i), 0);
            Kind::Check(s, Weight(i), in);
            CheckAdapters(s, Pool(i), kIndices, in, out);
            outputs.push_back(s.OfWithLast(kX, out));
        }
        return outputs;
    }

    static void CheckDtypes(const char** dtypes)
    {
        CheckDtype(kRoundedLinear, "x", dtypes[kX], "float32");
        for (int i = 0; i < kProducts; ++i) {
            Kind::CheckDtypes(dtypes, Weight(i));
            CheckAdapterDtypes(kRoundedLinear, dtypes, Pool(i), kIndices);
            CheckDtype(kRoundedLinear, "pool", dtypes[Pool(i)], dtypes[Pool(0)]);
        }
    }

    static int Run(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes)
    {
        const Shapes s(kRoundedLinear, ndims, shapes);
        Infer(s);
        CheckDtypes(dtypes);
        const bool has_bias = HasBias(kRoundedLinear, count, kBias, kProducts);
        WithElement(kRoundedLinear, dtypes[Pool(0)], [&](auto adapter) {
            using P = decltype(adapter);
            std::vector<Product<typename Kind::Weight, float, P>> products;
            for (int i = 0; i < kProducts; ++i) {
                const int64_t out = s.At(Weight(i), 0);
                const void* bias = has_bias ? BiasAt(kRoundedLinear, s, kBias + i, data, dtypes, out) : nullptr;
                products.push_back(
                    {Kind::At(s, data, Weight(i)), AdaptersAt<P>(kRoundedLinear, s, data, Pool(i), kIndices),
                        static_cast<const float*>(bias), out, static_cast<float*>(data[count - kProducts + i])});
            }
            Kind::Call(static_cast<const float*>(data[kX]), products, s.Tokens(kX), s.Width(kX), omp_get_max_threads());
        });
        return 0;
    }
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

// Exports so many products of a kind as an operator.
#define MINDLORA_EXPORT_PRODUCTS(name, kind, count)                                                    \
    MINDLORA_EXPORT auto name##InferShape(int* ndims, int64_t** shapes, AotExtra*)                     \
    {                                                                                                  \
        const ::mindlora::Shapes s(::mindlora::kRoundedLinear, ndims, shapes);                         \
        return ::mindlora::ShapesOfOutputs<count>(::mindlora::RoundedProducts<kind, count>::Infer(s)); \
    }                                                                                                  \
    MINDLORA_EXPORT auto name##InferType(std::vector<int> types, AotExtra*)                            \
    {                                                                                                  \
        return ::mindlora::TypesOfOutputs<count>(types[0]);                                            \
    }                                                                                                  \
    MINDLORA_EXPORT int name(                                                                          \
        int tensors, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)     \
    {                                                                                                  \
        return ::mindlora::RoundedProducts<kind, count>::Run(tensors, data, ndims, shapes, dtypes);    \
    }

}  // namespace mindlora
