// nf4_dequantize in CANN: its inputs and output, and how it is launched. Meaning: ../../README.md.
#include "ascendc_common/host.h"
#include "nf4_dequantize_plan.h"

namespace {

enum { kLike, kCodes, kAbsmax, kScales, kOffsets };

ge::graphStatus OutputShape(gert::InferShapeContext* context)
{
    const gert::Shape *like = context->GetInputShape(kLike), *absmax = context->GetInputShape(kAbsmax);
    gert::Shape* w = context->GetOutputShape(0);
    if (like == nullptr || absmax == nullptr || w == nullptr) return ge::GRAPH_FAILED;
    *w = *absmax;
    // Of an unknown rank, {-2}, there is nothing to set.
    if (w->GetDimNum() != 2) return ge::GRAPH_SUCCESS;
    const int64_t blocks = absmax->GetDim(1);
    if (like->GetDimNum() == 2) {
        w->SetDim(1, like->GetDim(1));
    } else {
        const bool known = like->GetDimNum() == 1 && like->GetDim(0) != -2 && blocks >= 0;
        w->SetDim(1, known ? blocks * static_cast<int64_t>(mindlora::kNf4Block) : -1);
    }
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus Tile(gert::TilingContext* context)
{
    mindlora::Shapes shapes("nf4_dequantize", context);
    shapes.Check(kCodes, "codes", 2);
    shapes.Check(kAbsmax, "absmax", 2);
    shapes.Check(kScales, "scales", 1);
    shapes.Check(kOffsets, "offsets", 1);
    // Only the dtype of a vector is used: W has whole blocks.
    const bool whole = shapes.Dimensions(kLike) == 1;
    shapes.Check(kLike, "like", whole ? 1 : 2);
    const int64_t rows = shapes.At(kAbsmax, 0), rowBlocks = shapes.At(kAbsmax, 1);
    const int64_t columns = whole ? rowBlocks * static_cast<int64_t>(mindlora::kNf4Block) : shapes.At(kLike, 1);
    shapes.CheckSizes(columns, rows);
    shapes.CheckSame("N", rows, shapes.At(kCodes, 0));
    shapes.CheckSame("the number of blocks of a row", mindlora::Nf4BlocksOf(columns), rowBlocks);
    shapes.CheckSame("the number of bytes of a row", shapes.At(kCodes, 1), rowBlocks * mindlora::kNf4Bytes);
    shapes.CheckRange("the number of blocks", rows * rowBlocks, 1, mindlora::kNf4MaxBlocks);
    const int64_t groups = mindlora::Nf4GroupsOf(rows * rowBlocks);
    shapes.CheckSame("the number of groups", groups, shapes.At(kScales, 0));
    shapes.CheckSame("the number of groups", groups, shapes.At(kOffsets, 0));
    const mindlora::Platform chip = mindlora::AskPlatform(context, shapes);
    if (!shapes.Good()) return ge::GRAPH_FAILED;
    return mindlora::Launch(
        context, mindlora::PlanNf4Dequantize(rows, columns, mindlora::ElementBytes(context, kLike), chip));
}

}  // namespace

namespace ops {

class Nf4Dequantize : public mindlora::Definition {
public:
    explicit Nf4Dequantize(const char* name) : Definition(name)
    {
        using namespace mindlora;
        In("like", Elements());
        In("codes", Always(ge::DT_UINT8));
        In("absmax", Always(ge::DT_UINT8));
        In("scales", Always(ge::DT_FLOAT));
        In("offsets", Always(ge::DT_FLOAT));
        Out("w", Elements());
        Functions(OutputShape, DataTypeOfInput<kLike>, Tile);
    }
};

OP_ADD(Nf4Dequantize);

}  // namespace ops
