// lora_delta in CANN: its inputs and output, and how it is launched. Meaning: ../../README.md.
#include "ascendc_common/host.h"
#include "lora_delta_plan.h"

namespace {

enum { kY0, kX, kA, kB, kScale };

ge::graphStatus Tile(gert::TilingContext* context)
{
    mindlora::Shapes shapes("lora_delta", context);
    shapes.Check(kY0, "y0", 2);
    shapes.Check(kX, "x", 2);
    shapes.CheckOneNumber(kScale, "scale");
    const int64_t tokens = shapes.At(kX, 0), in = shapes.At(kX, 1), out = shapes.At(kY0, 1);
    shapes.CheckSame("the number of tokens", shapes.At(kY0, 0), tokens);
    shapes.CheckPair(kA, kB, in, out);
    const mindlora::Platform chip = mindlora::AskPlatform(context, shapes);
    if (!shapes.Good()) return ge::GRAPH_FAILED;
    return mindlora::Launch(
        context, mindlora::PlanLoraDelta(tokens, in, out, shapes.At(kA, 0), mindlora::ElementBytes(context, kX), chip));
}

}  // namespace

namespace ops {

class LoraDelta : public mindlora::Definition {
public:
    explicit LoraDelta(const char* name) : Definition(name)
    {
        using namespace mindlora;
        In("y0", Elements());
        In("x", Elements());
        In("a", Elements());
        In("b", Elements());
        In("scale", Always(ge::DT_FLOAT));
        Out("y", Elements());
        Functions(ShapeOfInput<kY0>, DataTypeOfInput<kY0>, Tile);
    }
};

OP_ADD(LoraDelta);

}  // namespace ops
