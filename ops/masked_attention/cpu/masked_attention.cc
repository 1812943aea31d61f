// masked_attention on a CPU: softmax(scale q k^T + mask) v, and its gradient. Meaning and shapes: ../README.md.
#include <omp.h>

#include <cmath>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#include "masked_attention/cpu/sizes.h"
#define MINDLORA_KERNEL "masked_attention/cpu/masked_attention_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "masked_attention";
// The inputs; those of the gradient come after that of y.
enum { kQuery, kKey, kValue, kMask, kScale, kInputs };
constexpr const char* kNames[] = {"query", "key", "value", "mask", "scale"};

// Checks the inputs from number `first`.
void Check(const Shapes& s, int first)
{
    const int query = first + kQuery, key = first + kKey, mask = first + kMask;
    for (int i = kQuery; i <= kMask; ++i) s.CheckRank(first + i, kNames[i], 4);
    for (const int other : {key, first + kValue, mask}) {
        s.CheckSame("the number of rows", s.At(query, 0), s.At(other, 0));
        s.CheckSame("the number of tokens", s.At(query, 1), s.At(other, other == mask ? 2 : 1));
    }
    s.CheckSame("the number of tokens", s.At(query, 1), s.At(mask, 3));
    s.CheckSame("D", s.At(query, 3), s.At(key, 3));
    s.CheckSame("D", s.At(query, 3), s.At(first + kValue, 3));
    s.CheckSame("the number of heads", s.At(key, 2), s.At(first + kValue, 2));
    const int64_t heads = s.At(query, 2), key_heads = s.At(key, 2);
    if (key_heads == 0 || (heads > 0 && key_heads > 0 && heads % key_heads != 0)) {
        Refuse(kOp,
            "query has " + std::to_string(heads) + " heads and key " + std::to_string(key_heads) +
                ": those of query must be a multiple of those of key.");
    }
}

void CheckGrad(const Shapes& s)
{
    Check(s, 1);
    s.CheckRank(0, "dy", 4);
    for (int axis = 0; axis < 4; ++axis) s.CheckSame("the shape of y", s.At(0, axis), s.At(1, axis));
}

// Repeats the checks on known shapes, checks dtypes, and returns the sizes.
AttentionSizes Sizes(const Shapes& s, const char** dtypes, int first)
{
    Check(s, first);
    for (int i = 0; i < kInputs; ++i) CheckDtype(kOp, kNames[i], dtypes[first + i], "float32");
    const int query = first + kQuery;
    return {s.At(query, 0), s.At(query, 1), s.At(query, 2), s.At(first + kKey, 2), s.At(query, 3)};
}

const float* Input(void** data, int i) { return static_cast<const float*>(data[i]); }

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> MaskedAttentionInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s, 0);
    return s.Of(mindlora::kQuery);
}

MINDLORA_EXPORT int MaskedAttentionInferType(std::vector<int> types, AotExtra*) { return types[0]; }

MINDLORA_EXPORT int MaskedAttention(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const AttentionSizes sizes = Sizes(Shapes(kOp, ndims, shapes), dtypes, 0);
    MINDLORA_DISPATCH(MaskedAttention, sizes, Input(data, kQuery), Input(data, kKey), Input(data, kValue),
        Input(data, kMask), *Input(data, kScale), omp_get_max_threads(), static_cast<float*>(data[kInputs]));
    return 0;
}

MINDLORA_EXPORT std::vector<int64_t> MaskedAttentionGradInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckGrad(s);
    const int64_t heads = s.At(1, 2), key_heads = s.At(2, 2);
    return {s.At(1, 0), s.At(1, 1), heads < 0 || key_heads < 0 ? -1 : heads + 2 * key_heads, s.At(1, 3)};
}

MINDLORA_EXPORT int MaskedAttentionGradInferType(std::vector<int> types, AotExtra*) { return types[0]; }

MINDLORA_EXPORT int MaskedAttentionGrad(
    int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckGrad(s);
    const AttentionSizes sizes = Sizes(s, dtypes, 1);
    CheckDtype(kOp, "dy", dtypes[0], "float32");
    MINDLORA_DISPATCH(MaskedAttentionGrad, sizes, Input(data, 0), Input(data, 1 + kQuery), Input(data, 1 + kKey),
        Input(data, 1 + kValue), Input(data, 1 + kMask), *Input(data, 1 + kScale), omp_get_max_threads(),
        static_cast<float*>(data[1 + kInputs]));
    return 0;
}
