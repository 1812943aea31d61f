// How far plans are from the best ones at worst, by each value of the two figures that only an NPU can tell. The first
// line has the tenths of its even share that a core is taken to draw, where it really draws 1 to 3 shares; the second
// the nanoseconds that a launch of cube cores is taken to cost, where it really costs up to a third of 21 us. Each line
// begins with the value that plans have.
#include <cstdio>

#include "lora_delta/ascendc/op_host/lora_delta_plan.h"
#include "model/platform.h"

using namespace mindlora;
using namespace mindlora::prefill;

namespace {

struct Side {
    std::vector<Split> splits;
    Split chosen;
    bool expands;
};

// The time of a split where a core really draws `tenths`.
uint64_t TimeAt(const Side& side, const Split& split, uint64_t tokens, uint64_t rank, Platform chip, uint64_t tenths)
{
    chip.drawTenths = tenths;
    return TimeOf(side.expands ? ExpandLoad(split, tokens, rank) : ShrinkLoad(split, tokens, rank), split.parts, chip);
}

Split Chosen(const std::vector<Split>& splits, uint64_t rows, uint64_t slices, uint64_t width)
{
    for (const Split& split : splits) {
        if (split.rows == rows && split.slices == slices && split.width == width) return split;
    }
    return {};
}

double WorstOf(uint64_t tokens, uint64_t in, uint64_t out, uint64_t rank, const Platform& chip)
{
    Plan<LoraDeltaTiling> plan{};
    PlanPrefill(tokens, in, out, rank, chip, plan);
    PrefillTiling& t = plan.tiling.prefill;
    const uint64_t width = PlanTiles(rank, chip, t), cores = PairedCubeCores(chip);
    Side sides[] = {{SplitsOf(tokens, in, width, cores), {}, false}, {SplitsOf(tokens, out, width, cores), {}, true}};
    sides[0].chosen = Chosen(sides[0].splits, t.shrinkRows, t.shrinkSlices, t.shrinkDepth);
    sides[1].chosen = Chosen(sides[1].splits, t.expandRows, t.expandSlices, t.expandWidth);
    double worst = 0;
    for (uint64_t tenths = 10; tenths <= 30; tenths += 5) {
        double mine = 0, best = 0;
        for (const Side& side : sides) {
            uint64_t least = ~uint64_t{0};
            for (const Split& split : side.splits) {
                least = std::min(least, TimeAt(side, split, tokens, rank, chip, tenths));
            }
            mine += TimeAt(side, side.chosen, tokens, rank, chip, tenths);
            best += least;
        }
        worst = std::max(worst, mine / best);
    }
    return worst;
}

void PrintDraws(Platform chip)
{
    std::printf("%d", int{kDrawTenths});
    for (uint64_t tenths : {10, 11, 12, 13, 14, 15, 17, 20, 25, 30}) {
        chip.drawTenths = tenths;
        double worst = 0;
        for (uint64_t rank : {8, 16, 32, 64, 128}) {
            for (uint64_t in : {2048, 4096, 8192}) {
                for (uint64_t out : {2048, 4096, 5120, 8192}) {
                    for (uint64_t tokens = 16; tokens <= 2048; tokens *= 2) {
                        worst = std::max(worst, WorstOf(tokens, in, out, rank, chip));
                    }
                }
            }
        }
        std::printf(" %d:%.3f", int(tenths), worst);
    }
    std::puts("");
}

// The times of a product in nanoseconds, without launches.
struct Kinds {
    double vector;
    double cube;
};

std::vector<Kinds> AllKinds(Platform chip)
{
    std::vector<Kinds> all;
    for (uint64_t rank : {8, 16, 32, 64, 128}) {
        for (uint64_t in : {2048, 4096, 8192}) {
            for (uint64_t out : {2048, 4096, 5120, 8192}) {
                for (uint64_t tokens = 2; tokens <= 16; ++tokens) {
                    const auto time = [&](Cores cores) {
                        chip.cores = cores;
                        return double(PlanLoraDelta(tokens, in, out, rank, 2, chip).time) / kBytesPerNanosecond;
                    };
                    all.push_back({time(Cores::kVector), time(Cores::kCube)});
                }
            }
        }
    }
    return all;
}

// A launch takes as long as starting its cores: `mix` for the cube cores, and twice that for the vector cores.
void PrintLaunches(const Platform& chip)
{
    const std::vector<Kinds> all = AllKinds(chip);
    std::printf("%d", int{kMixLaunch});
    for (int taken : {0, 20, 41, 60, 80, 100, 120, 150, 200, 300, 500, 1000, 3000, 7000}) {
        double worst = 0;
        for (double mix = 0; mix <= 7000; mix += 500) {
            for (const Kinds& kinds : all) {
                const double vector = kinds.vector + 2 * mix, cube = kinds.cube + 3 * mix;
                worst = std::max(worst, (kinds.cube + taken < kinds.vector ? cube : vector) / std::min(vector, cube));
            }
        }
        std::printf(" %d:%.3f", taken, worst);
    }
    std::puts("");
}

}  // namespace

int main()
{
    const auto& model = ascendc_model::CurrentPlatform();
    const Platform chip{24, 48, model.unifiedBuffer, model.l1, model.l0a, model.l0b, model.l0c};
    PrintDraws(chip);
    PrintLaunches(chip);
}
