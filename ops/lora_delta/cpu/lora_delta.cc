// lora_delta on a CPU: y = y0 + ((x A^T) * scale) B^T. Meaning, shapes and limits: ../README.md.
#include <omp.h>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL "lora_delta/cpu/lora_delta_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "lora_delta";
enum { kY0, kX, kA, kB, kScale, kY };

void Check(const Shapes& s)
{
    s.CheckRank(kY0, "y0", 2);
    s.CheckRank(kX, "x", 2);
    s.CheckSame("the number of tokens", s.At(kY0, 0), s.At(kX, 0));
    s.CheckPair(kA, kB, s.At(kX, 1), s.At(kY0, 1));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> LoraDeltaInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kY0);
}

MINDLORA_EXPORT int LoraDeltaInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kY0]; }

MINDLORA_EXPORT int LoraDelta(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    const char* const names[] = {"y0", "x", "A", "B"};
    for (int i = kX; i <= kB; ++i) CheckDtype(kOp, names[i], dtypes[i], dtypes[kY0]);
    CheckDtype(kOp, "scale", dtypes[kScale], "float32");
    WithElement(kOp, dtypes[kY0], [&](auto element) {
        using T = decltype(element);
        const auto in = [&](int i) { return static_cast<const T*>(data[i]); };
        MINDLORA_DISPATCH(LoraDelta, in(kY0), in(kX), in(kA), in(kB), *static_cast<const float*>(data[kScale]),
            s.At(kX, 0), s.At(kX, 1), s.At(kY0, 1), s.At(kA, 0), omp_get_max_threads(), static_cast<T*>(data[kY]));
    });
    return 0;
}
