// multi_lora_linear on a CPU: a linear layer and the adapters of its tokens in one pass over W. See ../README.md.
#include <omp.h>

#include <atomic>
#include <thread>
#include <utility>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#include "cpu_common/slots.h"
#include "cpu_common/tasks.h"
#define MINDLORA_KERNEL "multi_lora_linear/cpu/multi_lora_linear_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "multi_lora_linear";
enum { kX, kW, kPool, kRanks, kScales, kIndices, kBias };
constexpr int kWithoutBias = 7, kWithBias = 8;  // tensors of one call, y included

void Check(const Shapes& s)
{
    s.CheckRank(kW, "W", 2);
    s.CheckPool(kPool, kRanks, kScales);
    s.CheckRank(kIndices, "indices", 1);
    s.CheckSame("K", s.Width(kX), s.At(kW, 1));
    s.CheckEnough(kIndices, "indices", s.Tokens(kX));
    if (s.At(kW, 1) >= 0 && s.At(kW, 0) >= 0) s.CheckSame("K + N", s.At(kW, 1) + s.At(kW, 0), s.At(kPool, 2));
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
    CheckDtype(kOp, "ranks", dtypes[kRanks], "int32");
    CheckDtype(kOp, "scales", dtypes[kScales], "float32");
    CheckDtype(kOp, "indices", dtypes[kIndices], "int32");
    if (count != kWithoutBias && count != kWithBias) Refuse(kOp, "called with " + std::to_string(count) + " tensors.");
    const bool has_bias = count == kWithBias;
    if (has_bias) {
        s.CheckRank(kBias, "bias", 1);
        s.CheckSame("N", s.At(kW, 0), s.At(kBias, 0));
        CheckDtype(kOp, "bias", dtypes[kBias], dtypes[kX]);
    }
    const int64_t tokens = s.Tokens(kX), max_rank = s.At(kPool, 1);
    const auto* ranks = static_cast<const int32_t*>(data[kRanks]);
    const auto* indices = static_cast<const int32_t*>(data[kIndices]);
    const std::vector<int64_t> order = SortedBySlot(kOp, indices, ranks, tokens, s.At(kPool, 0), max_rank);
    const auto run = [&](auto element, auto weight, auto adapter) {
        using T = decltype(element);
        using W = decltype(weight);
        using P = decltype(adapter);
        const auto in = [&](int i) { return static_cast<const T*>(data[i]); };
        MINDLORA_DISPATCH(MultiLoraLinear, in(kX), static_cast<const W*>(data[kW]), static_cast<const P*>(data[kPool]),
            ranks, static_cast<const float*>(data[kScales]), indices, has_bias ? in(kBias) : nullptr, order, tokens,
            s.At(kW, 1), s.At(kW, 0), max_rank, omp_get_max_threads(), static_cast<T*>(data[count - 1]));
    };
    if (widened) {
        WithElement(kOp, dtypes[kW],
            [&](auto weight) { WithElement(kOp, dtypes[kPool], [&](auto adapter) { run(0.0f, weight, adapter); }); });
    } else {
        WithElement(kOp, dtypes[kX], [&](auto element) { run(element, element, element); });
    }
    return 0;
}
