// lora_linear on a CPU: y = x W^T (+ bias) + ((x A^T) * scale) B^T in one pass over W. See ../README.md.
#include <omp.h>

#include <atomic>
#include <thread>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#define MINDLORA_KERNEL "lora_linear/cpu/lora_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "lora_linear";
enum { kX, kW, kA, kB, kScale, kBias };
constexpr int kWithoutBias = 6, kWithBias = 7;  // tensors of one call, y included

void Check(const Shapes& s)
{
    s.CheckRank(kX, "x", 2);
    s.CheckRank(kW, "W", 2);
    s.CheckSame("K", s.At(kX, 1), s.At(kW, 1));
    s.CheckPair(kA, kB, s.At(kX, 1), s.At(kW, 0));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> LoraLinearInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    return {s.At(kX, 0), s.At(kW, 0)};
}

MINDLORA_EXPORT int LoraLinearInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int LoraLinear(int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    const char* const names[] = {"x", "W", "A", "B"};
    for (int i = kW; i <= kB; ++i) CheckDtype(kOp, names[i], dtypes[i], dtypes[kX]);
    CheckDtype(kOp, "scale", dtypes[kScale], "float32");
    if (count != kWithoutBias && count != kWithBias) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    const bool has_bias = count == kWithBias;
    if (has_bias) {
        s.CheckRank(kBias, "bias", 1);
        s.CheckSame("N", s.At(kW, 0), s.At(kBias, 0));
        CheckDtype(kOp, "bias", dtypes[kBias], dtypes[kX]);
    }
    WithElement(kOp, dtypes[kX], [&](auto element) {
        using T = decltype(element);
        const auto in = [&](int i) { return static_cast<const T*>(data[i]); };
        MINDLORA_DISPATCH(LoraLinear, in(kX), in(kW), in(kA), in(kB), *static_cast<const float*>(data[kScale]),
            has_bias ? in(kBias) : nullptr, s.At(kX, 0), s.At(kX, 1), s.At(kW, 0), s.At(kA, 0), omp_get_max_threads(),
            static_cast<T*>(data[count - 1]));
    });
    return 0;
}
