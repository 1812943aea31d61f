// integer_linear on a CPU: y = x W^T, dx = dy W and ||W||^2 of each row, for W in integers of 4 or 8 bits. See
// ../README.md.
#include <omp.h>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "integer_linear/cpu/integer_weight.h"
#define MINDLORA_KERNEL "integer_linear/cpu/integer_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "integer_linear";
// In the gradient kX is dy. For the norms it is a tensor of their dtype, float32.
enum { kX, kCodes, kZeros, kScales };
constexpr int kTensors = 5;  // of one call, the result included

void CheckForward(const Shapes& s, int bits)
{
    s.CheckRank(kX, "x", 2);
    CheckIntegers(kOp, s, kCodes, bits, s.At(kX, 1));
}

void CheckBackward(const Shapes& s, int bits)
{
    s.CheckRank(kX, "dy", 2);
    CheckIntegers(kOp, s, kCodes, bits, -1);
    s.CheckSame("N", s.At(kX, 1), s.At(kCodes, 0));
}

std::vector<int64_t> ForwardShape(const Shapes& s, int bits)
{
    CheckForward(s, bits);
    return {s.At(kX, 0), s.At(kCodes, 0)};
}

std::vector<int64_t> BackwardShape(const Shapes& s, int bits)
{
    CheckBackward(s, bits);
    return {s.At(kX, 0), s.At(kCodes, 1) < 0 ? -1 : s.At(kCodes, 1) * 8 / bits};
}

template <int kBits>
int Run(int count, void** data, const Shapes& s, const char** dtypes)
{
    if (count != kTensors) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    CheckForward(s, kBits);
    const Integers weight = IntegersAt(kOp, s, data, dtypes, kCodes, kBits);
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(IntegerLinear<kBits>, static_cast<const T*>(data[kX]), weight, s.At(kX, 0), s.At(kX, 1),
            s.At(kCodes, 0), omp_get_max_threads(), static_cast<T*>(data[count - 1]));
    });
    return 0;
}

template <int kBits>
int RunGrad(int count, void** data, const Shapes& s, const char** dtypes)
{
    if (count != kTensors) Refuse(kOp, "the gradient called with " + std::to_string(count) + " tensors.");
    CheckBackward(s, kBits);
    const Integers weight = IntegersAt(kOp, s, data, dtypes, kCodes, kBits);
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(IntegerLinearGrad<kBits>, static_cast<const T*>(data[kX]), weight, s.At(kX, 0), s.At(kX, 1),
            s.At(kCodes, 1) * 8 / kBits, omp_get_max_threads(), static_cast<T*>(data[count - 1]));
    });
    return 0;
}

std::vector<int64_t> NormsShape(const Shapes& s, int bits)
{
    CheckIntegers(kOp, s, kCodes, bits, -1);
    return {s.At(kCodes, 0)};
}

template <int kBits>
int RunNorms(int count, void** data, const Shapes& s, const char** dtypes)
{
    if (count != kTensors) Refuse(kOp, "the norms called with " + std::to_string(count) + " tensors.");
    CheckDtype(kOp, "the first input", dtypes[kX], "float32");
    CheckIntegers(kOp, s, kCodes, kBits, -1);
    const Integers weight = IntegersAt(kOp, s, data, dtypes, kCodes, kBits);
    MINDLORA_DISPATCH(IntegerSquaredNorms<kBits>, weight, s.At(kCodes, 0), omp_get_max_threads(),
        static_cast<float*>(data[count - 1]));
    return 0;
}

}  // namespace
}  // namespace mindlora

// The entry points of one width of codes.
#define MINDLORA_INTEGER_LINEAR(bits)                                                                                 \
    MINDLORA_EXPORT std::vector<int64_t> Int##bits##LinearInferShape(int* ndims, int64_t** shapes, AotExtra*)         \
    {                                                                                                                 \
        return mindlora::ForwardShape(mindlora::Shapes(mindlora::kOp, ndims, shapes), bits);                          \
    }                                                                                                                 \
    MINDLORA_EXPORT int Int##bits##LinearInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; } \
    MINDLORA_EXPORT int Int##bits##Linear(                                                                            \
        int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)                      \
    {                                                                                                                 \
        return mindlora::Run<bits>(count, data, mindlora::Shapes(mindlora::kOp, ndims, shapes), dtypes);              \
    }                                                                                                                 \
    MINDLORA_EXPORT std::vector<int64_t> Int##bits##LinearGradInferShape(int* ndims, int64_t** shapes, AotExtra*)     \
    {                                                                                                                 \
        return mindlora::BackwardShape(mindlora::Shapes(mindlora::kOp, ndims, shapes), bits);                         \
    }                                                                                                                 \
    MINDLORA_EXPORT int Int##bits##LinearGradInferType(std::vector<int> types, AotExtra*)                             \
    {                                                                                                                 \
        return types[mindlora::kX];                                                                                   \
    }                                                                                                                 \
    MINDLORA_EXPORT int Int##bits##LinearGrad(                                                                        \
        int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)                      \
    {                                                                                                                 \
        return mindlora::RunGrad<bits>(count, data, mindlora::Shapes(mindlora::kOp, ndims, shapes), dtypes);          \
    }                                                                                                                 \
    MINDLORA_EXPORT std::vector<int64_t> Int##bits##SquaredNormsInferShape(int* ndims, int64_t** shapes, AotExtra*)   \
    {                                                                                                                 \
        return mindlora::NormsShape(mindlora::Shapes(mindlora::kOp, ndims, shapes), bits);                            \
    }                                                                                                                 \
    MINDLORA_EXPORT int Int##bits##SquaredNormsInferType(std::vector<int> types, AotExtra*)                           \
    {                                                                                                                 \
        return types[mindlora::kX];                                                                                   \
    }                                                                                                                 \
    MINDLORA_EXPORT int Int##bits##SquaredNorms(                                                                      \
        int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)                      \
    {                                                                                                                 \
        return mindlora::RunNorms<bits>(count, data, mindlora::Shapes(mindlora::kOp, ndims, shapes), dtypes);         \
    }

MINDLORA_INTEGER_LINEAR(4)
MINDLORA_INTEGER_LINEAR(8)
