// The adapters of a product: inputs pool, ranks and scales, one after the other, and indices. See ../README.md.
#pragma once

#include <vector>

#include "cpu_common/aot.h"
#include "cpu_common/slots.h"

namespace mindlora {

template <class P>
struct Adapters {
    const P* pool;  // of slots of [max_rank, K + N]
    int64_t max_rank;
    const int32_t* ranks;
    const float* scales;
    const int32_t* indices;
    std::vector<int64_t> order;  // the tokens with an adapter, those of one adapter together
};

// A product with x, whose tokens have K numbers. `Weight` is a pointer to W, or Nf4.
template <class Weight, class T, class P>
struct Product {
    Weight weight;
    Adapters<P> adapters;
    const T* bias;  // or null
    int64_t out;
    T* y;
};

// For x at input 0, whose tokens have `in` numbers, and y of `out`.
inline void CheckAdapters(const Shapes& s, int pool, int indices, int64_t in, int64_t out)
{
    s.CheckPool(pool, pool + 1, pool + 2);
    s.CheckEnough(indices, "indices", s.Tokens(0));
    if (in >= 0 && out >= 0) s.CheckSame("K + N", in + out, s.At(pool, 2));
}

inline void CheckAdapterDtypes(const char* op, const char** dtypes, int pool, int indices)
{
    CheckDtype(op, "ranks", dtypes[pool + 1], "int32");
    CheckDtype(op, "scales", dtypes[pool + 2], "float32");
    CheckDtype(op, "indices", dtypes[indices], "int32");
}

// Whether each of `products` has a bias: then these are the inputs from `bias` on, before as many outputs.
inline bool HasBias(const char* op, int count, int bias, int products)
{
    if (count != bias + products && count != bias + 2 * products) {
        Refuse(op, "called with " + std::to_string(count) + " tensors.");
    }
    return count == bias + 2 * products;
}

inline const void* BiasAt(const char* op, const Shapes& s, int bias, void** data, const char** dtypes, int64_t out)
{
    s.CheckRank(bias, "bias", 1);
    s.CheckSame("N", out, s.At(bias, 0));
    CheckDtype(op, "bias", dtypes[bias], dtypes[0]);
    return data[bias];
}

template <class P>
Adapters<P> AdaptersAt(const char* op, const Shapes& s, void** data, int pool, int indices)
{
    const auto* ranks = static_cast<const int32_t*>(data[pool + 1]);
    const auto* slots = static_cast<const int32_t*>(data[indices]);
    const int64_t max_rank = s.At(pool, 1);
    return {static_cast<const P*>(data[pool]), max_rank, ranks, static_cast<const float*>(data[pool + 2]), slots,
        SortedBySlot(op, slots, ranks, s.Tokens(0), s.At(pool, 0), max_rank)};
}

}  // namespace mindlora
