// multi_lora_linear on a CPU: a linear layer and the adapters of its tokens in one pass over W. See ../README.md.
#include <omp.h>

#include <atomic>
#include <thread>
#include <tuple>

#include "cpu_common/isa.h"
#include "cpu_common/tasks.h"
#include "multi_lora_linear/cpu/adapters.h"
#define MINDLORA_KERNEL "multi_lora_linear/cpu/multi_lora_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "multi_lora_linear";
enum { kX, kW, kPool, kIndices = kPool + 3, kBias };

void Check(const Shapes& s)
{
    s.CheckRank(kW, "W", 2);
    s.CheckSame("K", s.Width(kX), s.At(kW, 1));
    CheckAdapters(s, kPool, kIndices, s.At(kW, 1), s.At(kW, 0));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> MultiLoraLinearInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.OfWithLast(mindlora::kX, s.At(mindlora::kW, 0));
}

MINDLORA_EXPORT int MultiLoraLinearInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int MultiLoraLinear(
    int count, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    // A weight or a pool of 16 bits is widened as it is read.
    const bool widened = std::string(dtypes[kX]) == "float32";
    if (!widened) CheckDtype(kOp, "W", dtypes[kW], dtypes[kX]);
    if (!widened) CheckDtype(kOp, "pool", dtypes[kPool], dtypes[kX]);
    CheckAdapterDtypes(kOp, dtypes, kPool, kIndices);
    const int64_t out = s.At(kW, 0);
    const void* bias = HasBias(kOp, count, kBias, 1) ? BiasAt(kOp, s, kBias, data, dtypes, out) : nullptr;
    const auto run = [&](auto element, auto weight, auto adapter) {
        using T = decltype(element);
        using W = decltype(weight);
        using P = decltype(adapter);
        const Product<const W*, T, P> product{static_cast<const W*>(data[kW]),
            AdaptersAt<P>(kOp, s, data, kPool, kIndices), static_cast<const T*>(bias), out,
            static_cast<T*>(data[count - 1])};
        MINDLORA_DISPATCH(MultiLoraLinear, static_cast<const T*>(data[kX]), product, s.Tokens(kX), s.At(kW, 1),
            omp_get_max_threads());
    };
    if (widened) {
        WithElement(kOp, dtypes[kW],
            [&](auto weight) { WithElement(kOp, dtypes[kPool], [&](auto adapter) { run(0.0f, weight, adapter); }); });
    } else {
        WithElement(kOp, dtypes[kX], [&](auto element) { run(element, element, element); });
    }
    return 0;
}
