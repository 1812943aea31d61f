// rms_norm on a CPU: y = x / sqrt(mean(x^2) + eps) * weight, and its gradients. See ../README.md.
#include <omp.h>

#include <cmath>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL "rms_norm/cpu/rms_norm_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "rms_norm";
enum { kX, kWeight, kEps, kY };
namespace of_grad {
enum { kDy, kX, kWeight, kEps, kGrad };
}

void Check(const Shapes& s, int x, int weight)
{
    s.CheckRank(weight, "weight", 1);
    s.CheckSame("H", s.Width(x), s.At(weight, 0));
}

void CheckGrad(const Shapes& s)
{
    Check(s, of_grad::kX, of_grad::kWeight);
    s.CheckSame("the number of rows", s.Tokens(of_grad::kDy), s.Tokens(of_grad::kX));
    s.CheckSame("H", s.Width(of_grad::kDy), s.Width(of_grad::kX));
}

void CheckGradDtypes(const char** dtypes)
{
    CheckDtype(kOp, "x", dtypes[of_grad::kX], dtypes[of_grad::kDy]);
    CheckDtype(kOp, "weight", dtypes[of_grad::kWeight], dtypes[of_grad::kDy]);
    CheckDtype(kOp, "eps", dtypes[of_grad::kEps], "float32");
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> RmsNormInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s, kX, kWeight);
    return s.Of(kX);
}

MINDLORA_EXPORT int RmsNormInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RmsNorm(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s, kX, kWeight);
    CheckDtype(kOp, "weight", dtypes[kWeight], dtypes[kX]);
    CheckDtype(kOp, "eps", dtypes[kEps], "float32");
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(RmsNorm, static_cast<const T*>(data[kX]), static_cast<const T*>(data[kWeight]),
            *static_cast<const float*>(data[kEps]), s.Tokens(kX), s.Width(kX), omp_get_max_threads(),
            static_cast<T*>(data[kY]));
    });
    return 0;
}

MINDLORA_EXPORT std::vector<int64_t> RmsNormGradInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckGrad(s);
    return s.Of(of_grad::kX);
}

MINDLORA_EXPORT int RmsNormGradInferType(std::vector<int> types, AotExtra*) { return types[mindlora::of_grad::kDy]; }

MINDLORA_EXPORT int RmsNormGrad(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckGrad(s);
    CheckGradDtypes(dtypes);
    WithElement(kOp, dtypes[of_grad::kDy], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(RmsNormGrad, static_cast<const T*>(data[of_grad::kDy]),
            static_cast<const T*>(data[of_grad::kX]), static_cast<const T*>(data[of_grad::kWeight]),
            *static_cast<const float*>(data[of_grad::kEps]), s.Tokens(of_grad::kX), s.Width(of_grad::kX),
            omp_get_max_threads(), static_cast<T*>(data[of_grad::kGrad]));
    });
    return 0;
}

MINDLORA_EXPORT std::vector<int64_t> RmsNormWeightGradInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckGrad(s);
    return s.Of(of_grad::kWeight);
}

MINDLORA_EXPORT int RmsNormWeightGradInferType(std::vector<int> types, AotExtra*)
{
    return types[mindlora::of_grad::kDy];
}

MINDLORA_EXPORT int RmsNormWeightGrad(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    CheckGrad(s);
    CheckGradDtypes(dtypes);
    WithElement(kOp, dtypes[of_grad::kDy], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(RmsNormWeightGrad, static_cast<const T*>(data[of_grad::kDy]),
            static_cast<const T*>(data[of_grad::kX]), *static_cast<const float*>(data[of_grad::kEps]),
            s.Tokens(of_grad::kX), s.Width(of_grad::kX), omp_get_max_threads(), static_cast<T*>(data[of_grad::kGrad]));
    });
    return 0;
}
