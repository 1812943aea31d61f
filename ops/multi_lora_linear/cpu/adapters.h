// The adapters of a call: inputs pool, ranks, scales and indices, one after the other. See ../README.md.
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

// For x at input 0, whose tokens have `in` numbers, and y of `out`.
inline void CheckAdapters(const Shapes& s, int pool, int64_t in, int64_t out)
{
    s.CheckPool(pool, pool + 1, pool + 2);
    s.CheckEnough(pool + 3, "indices", s.Tokens(0));
    if (in >= 0 && out >= 0) s.CheckSame("K + N", in + out, s.At(pool, 2));
}

inline void CheckAdapterDtypes(const char* op, const char** dtypes, int pool)
{
    CheckDtype(op, "ranks", dtypes[pool + 1], "int32");
    CheckDtype(op, "scales", dtypes[pool + 2], "float32");
    CheckDtype(op, "indices", dtypes[pool + 3], "int32");
}

// The bias, which is the last input of a call with so many tensors, y included; null without one.
inline const void* BiasAt(
    const char* op, const Shapes& s, int count, int bias, void** data, const char** dtypes, int64_t out)
{
    if (count != bias + 1 && count != bias + 2) Refuse(op, "called with " + std::to_string(count) + " tensors.");
    if (count == bias + 1) return nullptr;
    s.CheckRank(bias, "bias", 1);
    s.CheckSame("N", out, s.At(bias, 0));
    CheckDtype(op, "bias", dtypes[bias], dtypes[0]);
    return data[bias];
}

template <class P>
Adapters<P> AdaptersAt(const char* op, const Shapes& s, void** data, int pool)
{
    const auto* ranks = static_cast<const int32_t*>(data[pool + 1]);
    const auto* indices = static_cast<const int32_t*>(data[pool + 3]);
    const int64_t max_rank = s.At(pool, 1);
    return {static_cast<const P*>(data[pool]), max_rank, ranks, static_cast<const float*>(data[pool + 2]), indices,
        SortedBySlot(op, indices, ranks, s.Tokens(0), s.At(pool, 0), max_rank)};
}

}  // namespace mindlora
