// kv_cache_write on a CPU: keys and values of tokens into their slots of the cache. See ../README.md.
#include <omp.h>

#include <algorithm>
#include <cstring>

#include "cpu_common/aot.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "kv_cache_write";
enum { kKey, kValue, kKeyCache, kValueCache, kSlots, kWritten };

void Check(const Shapes& s)
{
    s.CheckTokens(kKey, "key");
    s.CheckTokens(kValue, "value");
    s.CheckRank(kKeyCache, "key_cache", 4);
    s.CheckRank(kValueCache, "value_cache", 4);
    s.CheckRank(kSlots, "slot_mapping", 1);
    s.CheckSame("the number of tokens", s.Tokens(kKey), s.Tokens(kValue));
    s.CheckSame("the number of tokens", s.Tokens(kKey), s.At(kSlots, 0));
    const char* const names[] = {"the number of blocks", "block_size", "kv_heads", "D"};
    for (int axis = 0; axis < 4; ++axis) s.CheckSame(names[axis], s.At(kKeyCache, axis), s.At(kValueCache, axis));
    if (s.At(kKeyCache, 2) >= 0 && s.At(kKeyCache, 3) >= 0) {
        const int64_t width = s.At(kKeyCache, 2) * s.At(kKeyCache, 3);
        s.CheckSame("kv_heads * D", s.Width(kKey), width);
        s.CheckSame("kv_heads * D", s.Width(kValue), width);
    }
}

// Returns how many tokens have a slot.
int32_t CheckSlots(const int32_t* slots, int64_t tokens, int64_t count)
{
    int32_t written = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] >= count) {
            Refuse(kOp,
                "slot_mapping has slot " + std::to_string(slots[t]) + " for token " + std::to_string(t) +
                    ": the cache has " + std::to_string(count) + ".");
        }
        written += slots[t] >= 0;
    }
    return written;
}

void Write(const void* rows, const int32_t* slots, int64_t tokens, int64_t bytes, void* cache)
{
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots[t] < 0) continue;
        std::memcpy(static_cast<char*>(cache) + slots[t] * bytes, static_cast<const char*>(rows) + t * bytes, bytes);
    }
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> KvCacheWriteInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    mindlora::Check(mindlora::Shapes(mindlora::kOp, ndims, shapes));
    return {1};
}

MINDLORA_EXPORT int KvCacheWriteInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kSlots]; }

// The output is the number of tokens that were written: MindSpore has no operator without one.
MINDLORA_EXPORT int KvCacheWrite(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "value", dtypes[kValue], dtypes[kKey]);
    CheckDtype(kOp, "key_cache", dtypes[kKeyCache], dtypes[kKey]);
    CheckDtype(kOp, "value_cache", dtypes[kValueCache], dtypes[kKey]);
    CheckDtype(kOp, "slot_mapping", dtypes[kSlots], "int32");
    const int64_t tokens = s.Tokens(kKey);
    int64_t bytes = s.Width(kKey);
    WithElement(kOp, dtypes[kKey], [&](auto element) { bytes *= sizeof element; });
    const auto* slots = static_cast<const int32_t*>(data[kSlots]);
    // Every slot is checked before the first is written.
    const int32_t written = CheckSlots(slots, tokens, s.At(kKeyCache, 0) * s.At(kKeyCache, 1));
    // One thread for keys and one for values: a slot that is named twice keeps the later token, as it would in NumPy.
#pragma omp parallel for num_threads(std::min(2, omp_get_max_threads())) if (tokens * bytes > 65536)
    for (int i = 0; i < 2; ++i) Write(data[kKey + i], slots, tokens, bytes, data[kKeyCache + i]);
    *static_cast<int32_t*>(data[kWritten]) = written;
    return 0;
}
