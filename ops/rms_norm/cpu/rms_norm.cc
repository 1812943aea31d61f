// rms_norm on a CPU: y = x / sqrt(mean(x^2) + eps) * weight. See ../README.md.
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

void Check(const Shapes& s)
{
    s.CheckRank(kWeight, "weight", 1);
    s.CheckSame("H", s.Width(kX), s.At(kWeight, 0));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> RmsNormInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kX);
}

MINDLORA_EXPORT int RmsNormInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RmsNorm(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
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
