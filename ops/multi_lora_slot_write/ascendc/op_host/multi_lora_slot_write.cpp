// multi_lora_slot_write in CANN: its inputs and outputs, and how it is launched. Meaning: ../../README.md.
#include "ascendc_common/host.h"
#include "multi_lora_slot_write_plan.h"

namespace {

enum { kPool, kRanks, kScales, kSlot, kPacked, kScale };

ge::graphStatus Tile(gert::TilingContext* context)
{
    mindlora::Shapes shapes("multi_lora_slot_write", context);
    shapes.CheckPool(kPool, kRanks, kScales);
    shapes.CheckOneNumber(kSlot, "slot");
    shapes.Check(kPacked, "packed", 2);
    shapes.CheckOneNumber(kScale, "scale");
    const int64_t slots = shapes.At(kPool, 0), maxRank = shapes.At(kPool, 1), columns = shapes.At(kPool, 2);
    const int64_t rank = shapes.At(kPacked, 0);
    shapes.CheckSame("K + N", columns, shapes.At(kPacked, 1));
    shapes.CheckRange("rank", rank, 1, maxRank);
    const mindlora::Platform chip = mindlora::AskPlatform(context, shapes);
    if (!shapes.Good()) return ge::GRAPH_FAILED;
    return mindlora::Launch(context,
        mindlora::PlanMultiLoraSlotWrite(
            {slots, maxRank, columns, rank}, mindlora::ElementBytes(context, kPool), chip));
}

}  // namespace

namespace ops {

class MultiLoraSlotWrite : public mindlora::Definition {
public:
    explicit MultiLoraSlotWrite(const char* name) : Definition(name)
    {
        using namespace mindlora;
        InOut("pool", Elements());
        InOut("ranks", Always(ge::DT_INT32));
        InOut("scales", Always(ge::DT_FLOAT));
        In("slot", Always(ge::DT_INT32));
        In("packed", Elements());
        In("scale", Always(ge::DT_FLOAT));
        Out("pool", Elements());
        Out("ranks", Always(ge::DT_INT32));
        Out("scales", Always(ge::DT_FLOAT));
        Out("written", Always(ge::DT_INT32));
        Functions(ShapeOfInput<kPool, kRanks, kScales, kSlot>, DataTypeOfInput<kPool, kRanks, kScales, kSlot>, Tile);
    }
};

OP_ADD(MultiLoraSlotWrite);

}  // namespace ops
