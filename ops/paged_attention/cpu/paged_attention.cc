// paged_attention on a CPU: causal attention over keys and values in blocks of a cache. See ../README.md.
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
enum { kQuery, kKeyCache, kValueCache, kTables, kContexts, kQueries, kY };

void Check(const Shapes& s)
{
    s.CheckTokens(kQuery, "query");
    s.CheckRank(kKeyCache, "key_cache", 4);
    s.CheckRank(kValueCache, "value_cache", 4);
    s.CheckRank(kTables, "block_tables", 2);
    s.CheckRank(kContexts, "context_lengths", 1);
    s.CheckRank(kQueries, "query_lengths", 1);
    const char* const names[] = {"the number of blocks", "block_size", "kv_heads", "D"};
    for (int axis = 0; axis < 4; ++axis) s.CheckSame(names[axis], s.At(kKeyCache, axis), s.At(kValueCache, axis));
    s.CheckSame("the number of sequences", s.At(kTables, 0), s.At(kContexts, 0));
    s.CheckSame("the number of sequences", s.At(kTables, 0), s.At(kQueries, 0));
    const int64_t width = s.Width(kQuery), kv_heads = s.At(kKeyCache, 2), size = s.At(kKeyCache, 3);
    if (kv_heads == 0 || size == 0 || width == 0 ||
        (width >= 0 && kv_heads > 0 && size > 0 && width % (kv_heads * size) != 0)) {
        Refuse(kOp,
            "query has " + std::to_string(width) + " numbers a token: it must be a multiple of kv_heads * D = " +
                std::to_string(kv_heads) + " * " + std::to_string(size) + ".");
    }
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
    CheckDtype(kOp, "key_cache", dtypes[kKeyCache], dtypes[kQuery]);
    CheckDtype(kOp, "value_cache", dtypes[kValueCache], dtypes[kQuery]);
    CheckDtype(kOp, "block_tables", dtypes[kTables], "int32");
    CheckDtype(kOp, "context_lengths", dtypes[kContexts], "int32");
    CheckDtype(kOp, "query_lengths", dtypes[kQueries], "int32");
    const int64_t kv_heads = s.At(kKeyCache, 2), size = s.At(kKeyCache, 3);
    const AttentionShape shape{s.At(kKeyCache, 1), kv_heads, s.Width(kQuery) / (kv_heads * size), size,
        1 / std::sqrt(static_cast<float>(size))};
    const std::vector<Sequence> sequences = Sequences(kOp, static_cast<const int32_t*>(data[kTables]), s.At(kTables, 1),
        static_cast<const int32_t*>(data[kContexts]), static_cast<const int32_t*>(data[kQueries]), s.At(kTables, 0),
        s.At(kKeyCache, 0), shape.block_size, s.Tokens(kQuery));
    const int threads = omp_get_max_threads();
    const AttentionPlan plan = MakePlan(shape, sequences, threads);
    WithElement(kOp, dtypes[kQuery], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(PagedAttention, shape, plan, static_cast<const T*>(data[kQuery]),
            static_cast<const T*>(data[kKeyCache]), static_cast<const T*>(data[kValueCache]), threads,
            static_cast<T*>(data[kY]));
    });
    return 0;
}
