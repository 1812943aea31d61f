// nf4_linear on a CPU: y = x W^T (+ bias), dx = dy W and ||W||^2 of each row, for W in 4-bit NormalFloat. See
// ../README.md.
#include <omp.h>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "nf4_linear/cpu/nf4_weight.h"
#define MINDLORA_KERNEL "nf4_linear/cpu/nf4_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "nf4_linear";
// In the gradient kX is dy, and the last input may be x. For the norms kX is a tensor of their dtype, float32.
enum { kX, kCodes, kAbsmax, kScales, kOffsets, kBias, kLike = kBias };
constexpr int kWithoutBias = 6, kWithBias = 7;  // tensors of one call, y included

void CheckForward(const Shapes& s)
{
    s.CheckRank(kX, "x", 2);
    CheckNf4Weight(s, kCodes, s.At(kX, 1));
}

// nf4_dequantize makes W like x, or like a vector of any length; then W has whole blocks.
bool HasWholeBlocks(const Shapes& s) { return s.RankKnown(kX) && s.Of(kX).size() == 1; }

void CheckBackward(const Shapes& s)
{
    s.CheckRank(kX, "dy", 2);
    CheckNf4Weight(s, kCodes, -1);
    s.CheckSame("N", s.At(kX, 1), s.At(kCodes, 0));
}

void CheckBackwardLike(const Shapes& s)
{
    CheckBackward(s);
    s.CheckRank(kLike, "x", 2);
    s.CheckSame("the number of blocks of a row", Nf4BlocksOf(s.At(kLike, 1)), s.At(kAbsmax, 1));
}

void RunGrad(int count, int wanted, void** data, const Shapes& s, const char** dtypes, int64_t columns)
{
    if (count != wanted) Refuse(kOp, "the gradient called with " + std::to_string(count) + " tensors.");
    CheckNf4Dtypes(kOp, dtypes, kCodes);
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(Nf4LinearGrad<T>, static_cast<const T*>(data[kX]), Nf4At(s, data, kCodes), s.At(kX, 0),
            s.At(kX, 1), columns, omp_get_max_threads(), static_cast<T*>(data[count - 1]));
    });
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> Nf4LinearInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckForward(s);
    return {s.At(kX, 0), s.At(kCodes, 0)};
}

MINDLORA_EXPORT int Nf4LinearInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int Nf4Linear(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    if (count != kWithoutBias && count != kWithBias) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    CheckForward(s);
    CheckNf4Dtypes(kOp, dtypes, kCodes);
    const bool has_bias = count == kWithBias;
    if (has_bias) {
        s.CheckRank(kBias, "bias", 1);
        s.CheckSame("N", s.At(kCodes, 0), s.At(kBias, 0));
        CheckDtype(kOp, "bias", dtypes[kBias], dtypes[kX]);
    }
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(Nf4Linear<T>, static_cast<const T*>(data[kX]), Nf4At(s, data, kCodes),
            has_bias ? static_cast<const T*>(data[kBias]) : nullptr, s.At(kX, 0), s.At(kX, 1), s.At(kCodes, 0),
            omp_get_max_threads(), static_cast<T*>(data[count - 1]));
    });
    return 0;
}

// dx = dy W with the K columns padded to whole blocks. Where K is a multiple of 64, as it nearly always is, that is dx.
MINDLORA_EXPORT std::vector<int64_t> Nf4LinearGradInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckBackward(s);
    const int64_t blocks = s.At(kAbsmax, 1);
    return {s.At(kX, 0), blocks < 0 ? -1 : blocks * kNf4Block};
}

MINDLORA_EXPORT int Nf4LinearGradInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int Nf4LinearGrad(
    int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckBackward(s);
    RunGrad(count, kWithoutBias, data, s, dtypes, s.At(kAbsmax, 1) * kNf4Block);
    return 0;
}

// The same with as many columns as x, the last input, which is needed for its shape alone.
MINDLORA_EXPORT std::vector<int64_t> Nf4LinearGradLikeInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckBackwardLike(s);
    return {s.At(kX, 0), s.At(kLike, 1)};
}

MINDLORA_EXPORT int Nf4LinearGradLikeInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int Nf4LinearGradLike(
    int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckBackwardLike(s);
    RunGrad(count, kWithBias, data, s, dtypes, s.At(kLike, 1));
    return 0;
}

MINDLORA_EXPORT std::vector<int64_t> Nf4SquaredNormsInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckNf4Weight(s, kCodes, -1);
    return {s.At(kCodes, 0)};
}

MINDLORA_EXPORT int Nf4SquaredNormsInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int Nf4SquaredNorms(
    int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    if (count != kWithoutBias) Refuse(kOp, "the norms called with " + std::to_string(count) + " tensors.");
    CheckDtype(kOp, "the first input", dtypes[kX], "float32");
    CheckNf4Weight(s, kCodes, -1);
    CheckNf4Dtypes(kOp, dtypes, kCodes);
    MINDLORA_DISPATCH(Nf4SquaredNorms, Nf4At(s, data, kCodes), s.At(kCodes, 0), omp_get_max_threads(),
        static_cast<float*>(data[count - 1]));
    return 0;
}

// Only the Ascend kernel of nf4_dequantize computes W, but MindSpore asks this library for its shape and type.
MINDLORA_EXPORT std::vector<int64_t> Nf4DequantizeInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s("nf4_dequantize", ndims, shapes);
    if (!HasWholeBlocks(s)) {
        CheckForward(s);
        return {s.At(kCodes, 0), s.At(kX, 1)};
    }
    CheckNf4Weight(s, kCodes, -1);
    const int64_t blocks = s.At(kAbsmax, 1);
    return {s.At(kCodes, 0), blocks < 0 ? -1 : blocks * kNf4Block};
}

MINDLORA_EXPORT int Nf4DequantizeInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }
