// lora_dropout on a CPU: y = x / (1 - rate) or 0, by a hash of a seed. Meaning, shapes and limits: ../README.md.
#include <omp.h>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL "lora_dropout/cpu/lora_dropout_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "lora_dropout";
enum { kX, kSeed, kRate, kY };

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> LoraDropoutInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    s.CheckRank(mindlora::kX, "x", 2);
    return s.Of(mindlora::kX);
}

MINDLORA_EXPORT int LoraDropoutInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int LoraDropout(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    s.CheckRank(kX, "x", 2);
    CheckDtype(kOp, "seed", dtypes[kSeed], "int32");
    CheckDtype(kOp, "rate", dtypes[kRate], "float32");
    const float rate = *static_cast<const float*>(data[kRate]);
    if (!(rate >= 0 && rate < 1)) Refuse(kOp, "rate is " + std::to_string(rate) + ": it must be in [0, 1).");
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        MINDLORA_DISPATCH(LoraDropout, static_cast<const T*>(data[kX]), *static_cast<const uint32_t*>(data[kSeed]),
            static_cast<uint32_t>(rate * 2147483648.0f), 1.0f / (1.0f - rate), s.At(kX, 0), s.At(kX, 1),
            omp_get_max_threads(), static_cast<T*>(data[kY]));
    });
    return 0;
}
