// routed_experts on a CPU with weights in 4-bit NormalFloat, as mcore stacks them. See ../README.md.
#include <omp.h>

#include <cmath>
#include <utility>

#include "cpu_common/isa.h"
#include "nf4_linear/cpu/nf4_weight.h"
#include "routed_experts/cpu/routed_experts.h"

namespace mindlora {

// The matrices of all experts in NF4, [experts * in, out] with blocks along a row.
struct Nf4Experts {
    static constexpr int64_t kRange = 128;  // outputs of a task: codes of whole cache lines
    const uint8_t* codes;
    const uint8_t* absmax;
    const float* scales;
    const float* offsets;
    int64_t blocks;  // of a row
    int64_t in;
};

}  // namespace mindlora

#define MINDLORA_KERNEL "routed_experts/cpu/nf4_experts_kernel.h"
#include "cpu_common/for_each_isa.h"

namespace mindlora {
namespace {

constexpr char kOp[] = "routed_experts";
// Each weight is its codes, absmax, scales and offsets.
enum { kGateUp = 3, kDown = kGateUp + 4, kPools = kDown + 4, kY = kPools + 7 };
constexpr int64_t kBlock = 64, kBytes = 32;

int64_t Over(int64_t value, int64_t divisor) { return value < 0 ? -1 : Nf4Over(value, divisor); }

// The rows of gate_up, [experts * H, 2 I], tell the number of experts, and those of down, [experts * I, H], tell I.
ExpertSizes SizesOf(const Shapes& s)
{
    const int64_t hidden = s.Width(kX), gate_up = s.At(kGateUp, 0), down = s.At(kDown, 0);
    const int64_t experts = hidden > 0 && gate_up >= 0 ? gate_up / hidden : -1;
    return {experts, hidden, experts > 0 && down >= 0 ? down / experts : -1};
}

// The weight at input `at`: `rows` rows of so many numbers.
void CheckWeight(const Shapes& s, int at, const char* name, int64_t rows, int64_t columns)
{
    s.CheckRank(at, name, 2);
    s.CheckRank(at + 1, "absmax", 2);
    s.CheckRank(at + 2, "scales", 1);
    s.CheckRank(at + 3, "offsets", 1);
    s.CheckSame("the number of rows", rows, s.At(at, 0));
    s.CheckSame("the number of rows", s.At(at, 0), s.At(at + 1, 0));
    const int64_t blocks = Over(columns, kBlock);
    s.CheckSame("the number of blocks of a row", blocks, Over(s.At(at, 1), kBytes));
    s.CheckSame("the number of blocks of a row", blocks, s.At(at + 1, 1));
    const int64_t all = s.At(at, 0) < 0 || blocks < 0 ? -1 : s.At(at, 0) * blocks;
    s.CheckSame("the number of groups", Over(all, kNf4Group), s.At(at + 2, 0));
    s.CheckSame("the number of groups", s.At(at + 2, 0), s.At(at + 3, 0));
}

void Check(const Shapes& s)
{
    const auto [experts, hidden, inner] = SizesOf(s);
    const bool known = experts >= 0 && inner >= 0;
    CheckWeight(s, kGateUp, "gate_up", known ? experts * hidden : -1, known ? 2 * inner : -1);
    CheckWeight(s, kDown, "down", known ? experts * inner : -1, hidden);
    CheckRouted(kOp, s, {experts, hidden, inner}, kPools);
}

Nf4Experts ExpertsAt(void** data, const Shapes& s, int at, int64_t in)
{
    return {static_cast<const uint8_t*>(data[at]), static_cast<const uint8_t*>(data[at + 1]),
        static_cast<const float*>(data[at + 2]), static_cast<const float*>(data[at + 3]), s.At(at + 1, 1), in};
}

}  // namespace
}  // namespace mindlora

MINDLORA_EXPORT std::vector<int64_t> Nf4RoutedExpertsInferShape(int* ndims, int64_t** shapes, AotExtra*)
{
    const mindlora::Shapes s(mindlora::kOp, ndims, shapes);
    mindlora::Check(s);
    return s.Of(mindlora::kX);
}

MINDLORA_EXPORT int Nf4RoutedExpertsInferType(std::vector<int> types, AotExtra*) { return types[mindlora::kX]; }

MINDLORA_EXPORT int Nf4RoutedExperts(int, void** data, int* ndims, int64_t** shapes, const char** dtypes, void*, void*)
{
    using namespace mindlora;
    const Shapes s(kOp, ndims, shapes);
    Check(s);
    CheckRoutedDtypes(kOp, dtypes, kPools);
    for (const int weight : {kGateUp, kDown}) {
        CheckDtype(kOp, "codes", dtypes[weight], "uint8");
        CheckDtype(kOp, "absmax", dtypes[weight + 1], "uint8");
        CheckDtype(kOp, "scales", dtypes[weight + 2], "float32");
        CheckDtype(kOp, "offsets", dtypes[weight + 3], "float32");
    }
    const auto [experts, hidden, inner] = SizesOf(s);
    const std::vector<Pair> work = SortedByExpert(kOp, data, s, experts, kPools);
    const ExpertPairs gate_up_pairs = ExpertPairsAt(kOp, data, s, kPools, experts),
                      down_pairs = ExpertPairsAt(kOp, data, s, kPools + 3, experts);
    MINDLORA_DISPATCH(RoutedExperts, static_cast<const float*>(data[kX]), static_cast<const float*>(data[kWeights]),
        ExpertsAt(data, s, kGateUp, hidden), ExpertsAt(data, s, kDown, inner), gate_up_pairs, down_pairs, work,
        s.Tokens(kX), s.At(kExperts, 1), hidden, inner, omp_get_max_threads(), static_cast<float*>(data[kY]));
    return 0;
}
