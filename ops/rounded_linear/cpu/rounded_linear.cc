// rounded_linear on a CPU with W in bfloat16. See ../README.md.
#include <omp.h>

#include <atomic>
#include <thread>
#include <utility>

#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "multi_lora_linear/cpu/adapters.h"
#define MINDLORA_KERNEL_HAS_DOTS
#define MINDLORA_KERNEL "rounded_linear/cpu/rounded_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "rounded_linear";
enum { kX, kW, kPool, kBias = kPool + 4 };

void Check(const Shapes& s)
{
    s.CheckRank(kW, "W", 2);
    s.CheckSame("K", s.Width(kX), s.At(kW, 1));
    CheckAdapters(s, kPool, s.At(kW, 1), s.At(kW, 0));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> RoundedLinearInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.OfWithLast(mindlora::kX, s.At(mindlora::kW, 0));
}

MINDLORA_EXPORT int RoundedLinearInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int RoundedLinear(
    int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "x", dtypes[kX], "float32");
    CheckDtype(kOp, "W", dtypes[kW], "bfloat16");
    CheckAdapterDtypes(kOp, dtypes, kPool);
    const void* bias = BiasAt(kOp, s, count, kBias, data, dtypes, s.At(kW, 0));
    WithElement(kOp, dtypes[kPool], [&](auto adapter) {
        using P = decltype(adapter);
        MINDLORA_DISPATCH_DOTS(RoundedLinear, static_cast<const float*>(data[kX]),
            static_cast<const bfloat16*>(data[kW]), AdaptersAt<P>(kOp, s, data, kPool), static_cast<const float*>(bias),
            s.Tokens(kX), s.At(kW, 1), s.At(kW, 0), omp_get_max_threads(), static_cast<float*>(data[count - 1]));
    });
    return 0;
}
