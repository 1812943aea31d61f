// multi_lora_delta on a CPU: y[t] = y0[t] + ((x[t] A_i^T) * scale_i) B_i^T with i = indices[t]. See ../README.md.
#include <omp.h>

#include <utility>

#include "cpu_common/aot.h"
#include "cpu_common/isa.h"
#include "cpu_common/slots.h"
#define MINDLORA_KERNEL "multi_lora_delta/cpu/multi_lora_delta_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "multi_lora_delta";
enum { kY0, kX, kPool, kRanks, kScales, kIndices, kY };

void Check(const Shapes& s)
{
    s.CheckPool(kPool, kRanks, kScales);
    s.CheckSame("the number of tokens", s.Tokens(kY0), s.Tokens(kX));
    s.CheckEnough(kIndices, "indices", s.Tokens(kX));
    if (s.Width(kX) >= 0 && s.Width(kY0) >= 0) s.CheckSame("K + N", s.Width(kX) + s.Width(kY0), s.At(kPool, 2));
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> MultiLoraDeltaInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.OfWithLast(mindlora::kX, s.Width(mindlora::kY0));
}

MINDLORA_EXPORT int MultiLoraDeltaInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kY0]; }

MINDLORA_EXPORT int MultiLoraDelta(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckDtype(kOp, "x", dtypes[kX], dtypes[kY0]);
    // A pool of 16 bits is widened as it is read.
    const bool widened = std::string(dtypes[kY0]) == "float32";
    if (!widened) CheckDtype(kOp, "pool", dtypes[kPool], dtypes[kY0]);
    CheckDtype(kOp, "ranks", dtypes[kRanks], "int32");
    CheckDtype(kOp, "scales", dtypes[kScales], "float32");
    CheckDtype(kOp, "indices", dtypes[kIndices], "int32");
    const int64_t tokens = s.Tokens(kX), in = s.Width(kX), out = s.Width(kY0), max_rank = s.At(kPool, 1);
    const auto* ranks = static_cast<const int32_t*>(data[kRanks]);
    const auto* indices = static_cast<const int32_t*>(data[kIndices]);
    const std::vector<int64_t> order = SortedBySlot(kOp, indices, ranks, tokens, s.At(kPool, 0), max_rank);
    const auto run = [&](auto element, auto adapter) {
        using T = decltype(element);
        using P = decltype(adapter);
        const T* y0 = static_cast<const T*>(data[kY0]);
        T* y = static_cast<T*>(data[kY]);
        for (int64_t t = 0; t < tokens; ++t) {
            if (indices[t] < 0 || ranks[indices[t]] == 0) std::memcpy(y + t * out, y0 + t * out, out * sizeof(T));
        }
        MINDLORA_DISPATCH(MultiLoraDelta, y0, static_cast<const T*>(data[kX]), static_cast<const P*>(data[kPool]),
            ranks, static_cast<const float*>(data[kScales]), indices, order, in, out, max_rank, omp_get_max_threads(),
            y);
    };
    if (widened) {
        WithElement(kOp, dtypes[kPool], [&](auto adapter) { run(0.0f, adapter); });
    } else {
        WithElement(kOp, dtypes[kY0], [&](auto element) { run(element, element); });
    }
    return 0;
}
