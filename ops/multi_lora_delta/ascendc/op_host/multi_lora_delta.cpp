// multi_lora_delta in CANN: its inputs and output, and how it is launched. Meaning: ../../README.md.
#include "ascendc_common/host.h"
#include "multi_lora_delta_plan.h"

namespace {

enum { kY0, kX, kPool, kRanks, kScales, kIndices };

ge::graphStatus Tile(gert::TilingContext* context)
{
    mindlora::Shapes shapes("multi_lora_delta", context);
    shapes.Check(kY0, "y0", 2);
    shapes.Check(kX, "x", 2);
    shapes.CheckPool(kPool, kRanks, kScales);
    shapes.Check(kIndices, "indices", 1);
    const int64_t tokens = shapes.At(kX, 0), in = shapes.At(kX, 1), out = shapes.At(kY0, 1);
    const int64_t slots = shapes.At(kPool, 0), maxRank = shapes.At(kPool, 1);
    shapes.CheckSame("the number of tokens", shapes.At(kY0, 0), tokens);
    shapes.CheckRange("the number of indices", shapes.At(kIndices, 0), tokens, mindlora::kMaxSize);
    shapes.CheckSame("K + N", in + out, shapes.At(kPool, 2));
    shapes.CheckSizes(in, out);
    shapes.CheckRange("K + N", in + out, 2, mindlora::kMaxRow);
    const mindlora::Platform chip = mindlora::AskPlatform(context, shapes);
    shapes.CheckRange("the number of slots", slots, 0, mindlora::MultiLoraDeltaMaxSlots(chip));
    if (!shapes.Good()) return ge::GRAPH_FAILED;
    return mindlora::Launch(context,
        mindlora::PlanMultiLoraDelta({tokens, slots, maxRank, in, out}, mindlora::ElementBytes(context, kX), chip));
}

}  // namespace

namespace ops {

class MultiLoraDelta : public mindlora::Definition {
public:
    explicit MultiLoraDelta(const char* name) : Definition(name)
    {
        using namespace mindlora;
        In("y0", Elements());
        In("x", Elements());
        In("pool", Elements());
        In("ranks", Always(ge::DT_INT32));
        In("scales", Always(ge::DT_FLOAT));
        In("indices", Always(ge::DT_INT32));
        Out("y", Elements());
        Functions(ShapeOfInput<kY0>, DataTypeOfInput<kY0>, Tile);
    }
};

OP_ADD(MultiLoraDelta);

}  // namespace ops
