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
// Of the experts, the row of x after each one's last.
enum { kGroups = 2, kExpertsOut, kExpertsCount };
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

// Experts' weights [experts * in, out], one below the other: y_e = x_e W_e, or dx_e = dy_e W_e^T where kBackward.
template <bool kBackward>
std::vector<int64_t> InferExpertsShape(int* ndims, int64_t** shapes)
{
    const Shapes s(kOp, ndims, shapes);
    s.CheckRank(kX, kBackward ? "dy" : "x", 2);
    s.CheckRank(kWeight, "W", 2);
    s.CheckRank(kGroups, "groups", 1);
    const int64_t experts = s.At(kGroups, 0), in = experts > 0 ? s.At(kWeight, 0) / experts : 0;
    s.CheckSame("the rows of W", s.At(kWeight, 0), experts * in);
    s.CheckSame(kBackward ? "out" : "in", s.At(kX, 1), kBackward ? s.At(kWeight, 1) : in);
    return {s.At(kX, 0), kBackward ? in : s.At(kWeight, 1)};
}

// Refuses groups that do not follow each other within `rows` rows.
void CheckGroups(const int64_t* groups, int64_t experts, int64_t rows)
{
    for (int64_t e = 0, begin = 0; e < experts; begin = groups[e++]) {
        if (groups[e] < begin || groups[e] > rows) {
            Refuse(kOp,
                "groups has " + std::to_string(groups[e]) + " after " + std::to_string(begin) +
                    ": each must be at least the one before, and at most " + std::to_string(rows) + ", the rows of x.");
        }
    }
}

template <bool kBackward, bool kRounds>
int RunExperts(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes)
{
    if (count != kExpertsCount) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    const std::vector<int64_t> out = InferExpertsShape<kBackward>(ndims, shapes);
    const Shapes s(kOp, ndims, shapes);
    CheckDtype(kOp, kBackward ? "dy" : "x", dtypes[kX], "float32");
    CheckDtype(kOp, "groups", dtypes[kGroups], "int64");
    if (kRounds) CheckDtype(kOp, "W", dtypes[kWeight], "bfloat16");
    const int64_t experts = s.At(kGroups, 0), rows = s.At(kX, 0), depth = s.At(kX, 1), columns = s.At(kWeight, 1);
    const int64_t in = s.At(kWeight, 0) / experts;
    const auto* groups = static_cast<const int64_t*>(data[kGroups]);
    const auto* x = static_cast<const float*>(data[kX]);
    auto* y = static_cast<float*>(data[kExpertsOut]);
    CheckGroups(groups, experts, rows);
    WithWeight(dtypes, [&](auto element) {
        using W = decltype(element);
        const auto* weight = static_cast<const W*>(data[kWeight]);
        for (int64_t e = 0, begin = 0; e < experts; begin = groups[e++]) {
            // W_e is [in, out]: what is the gradient of a linear layer is the forward of an expert.
            MINDLORA_DISPATCH_DOTS(FrozenProduct<W>, !kBackward, kRounds, x + begin * depth, weight + e * in * columns,
                groups[e] - begin, in, columns, omp_get_max_threads(), y + begin * out[1]);
        }
    });
    const int64_t end = groups[experts - 1];
    std::fill(y + end * out[1], y + rows * out[1], 0.0f);
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

#define MINDLORA_EXPORT_KERNEL(name, shape, run)                                                                      \
    MINDLORA_EXPORT std::vector<int64_t> name##InferShape(int* ndims, int64_t** shapes, AotExtra*)                    \
    {                                                                                                                 \
        return shape(ndims, shapes);                                                                                  \
    }                                                                                                                 \
    MINDLORA_EXPORT int name##InferType(std::vector<int> types, AotExtra*) { return types[::mindlora::kX]; }          \
    MINDLORA_EXPORT int name(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*) \
    {                                                                                                                 \
        return run(count, data, ndims, shapes, dtypes);                                                               \
    }
#define MINDLORA_EXPORT_FROZEN(name, backward, rounds) \
    MINDLORA_EXPORT_KERNEL(name, mindlora::InferShape<backward>, (mindlora::Run<backward, rounds>))
#define MINDLORA_EXPORT_FROZEN_EXPERTS(name, backward, rounds) \
    MINDLORA_EXPORT_KERNEL(name, mindlora::InferExpertsShape<backward>, (mindlora::RunExperts<backward, rounds>))

MINDLORA_EXPORT_FROZEN(FrozenLinear, false, false)
MINDLORA_EXPORT_FROZEN(FrozenLinearGrad, true, false)
MINDLORA_EXPORT_FROZEN(FrozenLinearRounded, false, true)
MINDLORA_EXPORT_FROZEN(FrozenLinearRoundedGrad, true, true)

MINDLORA_EXPORT_FROZEN_EXPERTS(FrozenExperts, false, false)
MINDLORA_EXPORT_FROZEN_EXPERTS(FrozenExpertsGrad, true, false)
MINDLORA_EXPORT_FROZEN_EXPERTS(FrozenExpertsRounded, false, true)
MINDLORA_EXPORT_FROZEN_EXPERTS(FrozenExpertsRoundedGrad, true, true)

MINDLORA_EXPORT std::vector<int64_t> FrozenRowsInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    return mindlora::InferRowsShape(ndims, shapes);
}

MINDLORA_EXPORT int FrozenRowsInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kLike]; }

MINDLORA_EXPORT int FrozenRows(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    return mindlora::RunRows(count, data, ndims, shapes, dtypes);
}
