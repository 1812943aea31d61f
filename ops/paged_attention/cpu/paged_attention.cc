// paged_attention on a CPU: new keys and values into the blocks of a cache, and causal attention over it. See
// ../README.md.
#include <omp.h>

#include <cmath>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#include "paged_attention/cpu/plan.h"
#define MINDLORA_KERNEL "paged_attention/cpu/paged_attention_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "paged_attention";
enum { kQuery, kKey, kValue, kCos, kSin, kKeyCache, kValueCache, kTables, kContexts, kQueries, kY };
const char* const kNames[] = {"query", "key", "value", "cos", "sin", "key_cache", "value_cache", "block_tables",
    "context_lengths", "query_lengths"};

void CheckCaches(const Shapes& s)
{
    for (const int i : {kKeyCache, kValueCache}) s.CheckRank(i, kNames[i], 4);
    s.CheckRank(kTables, kNames[kTables], 2);
    for (const int i : {kContexts, kQueries}) s.CheckRank(i, kNames[i], 1);
    const char* const names[] = {"the number of blocks", "block_size", "kv_heads", "D"};
    for (int axis = 0; axis < 4; ++axis) s.CheckSame(names[axis], s.At(kKeyCache, axis), s.At(kValueCache, axis));
    s.CheckSame("the number of sequences", s.At(kTables, 0), s.At(kContexts, 0));
    s.CheckSame("the number of sequences", s.At(kTables, 0), s.At(kQueries, 0));
}

void CheckWidths(int64_t query, int64_t kv_heads, int64_t size)
{
    if (size == 0 || (size > 0 && size % 2 != 0)) {
        Refuse(kOp, "D is " + std::to_string(size) + " in key_cache: it must be even and at least 2.");
    }
    if (kv_heads == 0 || query == 0 || (query >= 0 && kv_heads > 0 && size > 0 && query % (kv_heads * size) != 0)) {
        Refuse(kOp,
            "query has " + std::to_string(query) + " numbers a token: it must be a multiple of kv_heads * D = " +
                std::to_string(kv_heads) + " * " + std::to_string(size) + ".");
    }
}

void Check(const Shapes& s)
{
    for (const int i : {kQuery, kKey, kValue}) {
        s.CheckTokens(i, kNames[i]);
        s.CheckSame("the number of tokens", s.Tokens(kQuery), s.Tokens(i));
    }
    CheckCaches(s);
    const int64_t kv_heads = s.At(kKeyCache, 2), size = s.At(kKeyCache, 3);
    CheckWidths(s.Width(kQuery), kv_heads, size);
    if (kv_heads >= 0 && size >= 0) {
        s.CheckSame("kv_heads * D", s.Width(kKey), kv_heads * size);
        s.CheckSame("kv_heads * D", s.Width(kValue), kv_heads * size);
    }
    for (const int i : {kCos, kSin}) {
        s.CheckRank(i, kNames[i], 2);
        s.CheckSame("the number of tokens", s.Tokens(kQuery), s.At(i, 0));
        s.CheckSame("D", s.At(i, 1), size);
    }
}

void CheckDtypes(const char** dtypes)
{
    for (const int i : {kKey, kValue, kKeyCache, kValueCache}) {
        CheckDtype(kOp, kNames[i], dtypes[i], dtypes[kQuery]);
    }
    CheckDtype(kOp, "sin", dtypes[kSin], dtypes[kCos]);
    for (const int i : {kTables, kContexts, kQueries}) CheckDtype(kOp, kNames[i], dtypes[i], "int32");
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> PagedAttentionInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kQuery);
}

MINDLORA_EXPORT int PagedAttentionInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kQuery]; }

MINDLORA_EXPORT int PagedAttention(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtypes(dtypes);
    const int64_t kv_heads = s.At(kKeyCache, 2), size = s.At(kKeyCache, 3);
    const AttentionShape shape{s.At(kKeyCache, 1), kv_heads, s.Width(kQuery) / (kv_heads * size), size,
        1 / std::sqrt(static_cast<float>(size))};
    const std::vector<Sequence> sequences = Sequences(kOp, static_cast<const int32_t*>(data[kTables]), s.At(kTables, 1),
        static_cast<const int32_t*>(data[kContexts]), static_cast<const int32_t*>(data[kQueries]), s.At(kTables, 0),
        s.At(kKeyCache, 0), shape.block_size, s.Tokens(kQuery));
    const int threads = omp_get_max_threads();
    const std::vector<int64_t> places = Places(shape, sequences);
    const AttentionPlan plan = MakePlan(shape, sequences, threads);
    WithElement(kOp, dtypes[kQuery], [&](auto element) {
        using T = decltype(element);
        T *key_cache = static_cast<T*>(data[kKeyCache]), *value_cache = static_cast<T*>(data[kValueCache]),
          *y = static_cast<T*>(data[kY]);
        // The output has room for the turned queries: no task writes to it before it has read those of its rows.
        WithElement(kOp, dtypes[kCos], [&](auto cos_element) {
            using C = decltype(cos_element);
            const NewTokens<T, C> tokens{static_cast<const T*>(data[kQuery]), static_cast<const T*>(data[kKey]),
                static_cast<const T*>(data[kValue]), static_cast<const C*>(data[kCos]),
                static_cast<const C*>(data[kSin])};
            MINDLORA_DISPATCH(TakeTokens, shape, tokens, places, threads, key_cache, value_cache, y);
        });
        MINDLORA_DISPATCH(PagedAttention, shape, plan, key_cache, value_cache, threads, y);
    });
    return 0;
}
