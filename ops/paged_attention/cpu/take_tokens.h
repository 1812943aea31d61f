// The tokens of a step before its attention: queries and keys are turned by their positions, and keys and values go
// into the cache. Included by paged_attention_kernel.h.
#include "rotary_embedding/cpu/rotate_token.h"

template <class T, class C>
static void TakeTokens(const AttentionShape& a, const NewTokens<T, C>& tokens, const std::vector<int64_t>& places,
    int threads, T* key_cache, T* value_cache, T* turned)
{
    const int64_t count = places.size(), heads = a.kv_heads * a.group, width = heads * a.size,
                  kv_width = a.kv_heads * a.size;
    // Below this many numbers to start threads would cost more than they save.
#pragma omp parallel for schedule(static) num_threads(threads) if (count * width > 32768)
    for (int64_t t = 0; t < count; ++t) {
        const C *cos = tokens.cos + t * a.size, *sin = tokens.sin + t * a.size;
        RotateToken<false>(tokens.query + t * width, cos, sin, heads, a.size / 2, turned + t * width);
        RotateToken<false>(tokens.key + t * kv_width, cos, sin, a.kv_heads, a.size / 2, key_cache + places[t]);
        std::copy_n(tokens.value + t * kv_width, kv_width, value_cache + places[t]);
    }
}
