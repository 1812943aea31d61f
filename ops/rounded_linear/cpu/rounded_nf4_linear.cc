// rounded_linear on a CPU with W in 4-bit NormalFloat. See ../README.md.
#include <omp.h>

#include <atomic>
#include <thread>
#include <utility>

#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "multi_lora_linear/cpu/adapters.h"
#include "nf4_linear/cpu/nf4_weight.h"
#define MINDLORA_KERNEL_HAS_DOTS
#define MINDLORA_KERNEL "rounded_linear/cpu/rounded_nf4_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "rounded_linear";
enum { kX, kCodes, kPool = kCodes + 4, kBias = kPool + 4 };

void Check(const Shapes& s)
{
    CheckNf4Weight(s, kCodes, s.Width(kX));
    CheckAdapters(s, kPool, s.Width(kX), s.At(kCodes, 0));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> RoundedNf4LinearInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    return s.OfWithLast(kX, s.At(kCodes, 0));
}

MINDLORA_EXPORT int RoundedNf4LinearInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RoundedNf4Linear(
    int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "x", dtypes[kX], "float32");
    CheckNf4Dtypes(kOp, dtypes, kCodes);
    CheckAdapterDtypes(kOp, dtypes, kPool);
    const int64_t in = s.Width(kX), out = s.At(kCodes, 0);
    const void* bias = BiasAt(kOp, s, count, kBias, data, dtypes, out);
    WithElement(kOp, dtypes[kPool], [&](auto adapter) {
        using P = decltype(adapter);
        MINDLORA_DISPATCH_DOTS(RoundedNf4Linear<P>, static_cast<const float*>(data[kX]), MINDLORA_NF4(data, s, kCodes),
            AdaptersAt<P>(kOp, s, data, kPool), static_cast<const float*>(bias), s.Tokens(kX), in, out,
            omp_get_max_threads(), static_cast<float*>(data[count - 1]));
    });
    return 0;
}
