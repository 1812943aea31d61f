// frozen_linear on a CPU: y = x W^T and dx = dy W for a frozen W in 16 bits. See ../README.md.
#include <omp.h>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL_HAS_DOTS
#define MINDLORA_KERNEL "frozen_linear/cpu/frozen_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "frozen_linear";
// In the gradient kX is dy, and the output is dx.
enum { kX, kWeight, kOut, kCount };
// Of the rows, the last input is there for its type, float32.
enum { kLike = 2, kRowsOut, kRowsCount };

// Calls f with a value of W's element type.
template <class F>
void WithWeight(const char** dtypes, F f)
{
    if (std::string(dtypes[kWeight]) == "bfloat16") {
        f(bfloat16());
    } else {
        CheckDtype(kOp, "W", dtypes[kWeight], "float16");
        f(float16());
    }
}

template <bool kBackward>
std::vector<int64_t> InferShape(int* ndims, int64_t** shapes)
{
    const Shapes s(kOp, ndims, shapes);
    s.CheckRank(kX, kBackward ? "dy" : "x", 2);
    s.CheckRank(kWeight, "W", 2);
    s.CheckSame(kBackward ? "N" : "K", s.At(kX, 1), s.At(kWeight, kBackward ? 0 : 1));
    return {s.At(kX, 0), s.At(kWeight, kBackward ? 1 : 0)};
}

template <bool kBackward, bool kRounds>
int Run(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes)
{
    if (count != kCount) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    InferShape<kBackward>(ndims, shapes);
    const Shapes s(kOp, ndims, shapes);
    CheckDtype(kOp, kBackward ? "dy" : "x", dtypes[kX], "float32");
    if (kRounds) CheckDtype(kOp, "W", dtypes[kWeight], "bfloat16");
    WithWeight(dtypes, [&](auto element) {
        using W = decltype(element);
        MINDLORA_DISPATCH_DOTS(FrozenProduct<W>, kBackward, kRounds, static_cast<const float*>(data[kX]),
            static_cast<const W*>(data[kWeight]), s.At(kX, 0), s.At(kWeight, 0), s.At(kWeight, 1),
            omp_get_max_threads(), static_cast<float*>(data[kOut]));
    });
    return 0;
}

// The rows of W by number, in float32.
std::vector<int64_t> InferRowsShape(int* ndims, int64_t** shapes)
{
    const Shapes s(kOp, ndims, shapes);
    s.CheckRank(kWeight, "W", 2);
    std::vector<int64_t> shape = s.Of(kX);
    shape.push_back(s.At(kWeight, 1));
    return shape;
}

template <class W>
void CopyRows(const int32_t* ids, int64_t count, const W* weight, int64_t rows, int64_t columns, float* to)
{
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= rows) {
            Refuse(kOp, "ids has " + std::to_string(ids[i]) + ", and W has " + std::to_string(rows) + " rows.");
        }
        for (int64_t c = 0; c < columns; ++c) to[i * columns + c] = ToFloat(weight[ids[i] * columns + c]);
    }
}

int RunRows(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes)
{
    if (count != kRowsCount) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    const Shapes s(kOp, ndims, shapes);
    InferRowsShape(ndims, shapes);
    CheckDtype(kOp, "ids", dtypes[kX], "int32");
    CheckDtype(kOp, "the last input", dtypes[kLike], "float32");
    WithWeight(dtypes, [&](auto element) {
        using W = decltype(element);
        int64_t numbers = 1;
        for (const int64_t length : s.Of(kX)) numbers *= length;
        CopyRows(static_cast<const int32_t*>(data[kX]), numbers, static_cast<const W*>(data[kWeight]), s.At(kWeight, 0),
            s.At(kWeight, 1), static_cast<float*>(data[kRowsOut]));
    });
    return 0;
}

}  // namespace
}  // namespace mindlora

#define MINDLORA_EXPORT_FROZEN(name, backward, rounds)                                                                \
    MINDLORA_EXPORT std::vector<int64_t> name##InferShape(int* ndims, int64_t** shapes, AotExtra*)                    \
    {                                                                                                                 \
        return ::mindlora::InferShape<backward>(ndims, shapes);                                                       \
    }                                                                                                                 \
    MINDLORA_EXPORT int name##InferType(std::vector<int> types, AotExtra*) { return types[::mindlora::kX]; }          \
    MINDLORA_EXPORT int name(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*) \
    {                                                                                                                 \
        return ::mindlora::Run<backward, rounds>(count, data, ndims, shapes, dtypes);                                 \
    }

MINDLORA_EXPORT_FROZEN(FrozenLinear, false, false)
MINDLORA_EXPORT_FROZEN(FrozenLinearGrad, true, false)
MINDLORA_EXPORT_FROZEN(FrozenLinearRounded, false, true)
MINDLORA_EXPORT_FROZEN(FrozenLinearRoundedGrad, true, true)

MINDLORA_EXPORT std::vector<int64_t> FrozenRowsInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    return mindlora::InferRowsShape(ndims, shapes);
}

MINDLORA_EXPORT int FrozenRowsInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kLike]; }

MINDLORA_EXPORT int FrozenRows(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    return mindlora::RunRows(count, data, ndims, shapes, dtypes);
}
