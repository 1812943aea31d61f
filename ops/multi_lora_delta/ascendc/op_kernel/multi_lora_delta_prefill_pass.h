// Prefill: the rows that no adapter changes, and those that name a slot that does not exist. The vector cores write
// them, so no NaN of theirs enters a product: for the cube, documents of CANN call that a possible error of execution.
#pragma once

#include "ascendc_common/copy.h"
#include "ascendc_common/share.h"
#include "multi_lora_delta_adapters.h"

namespace mindlora {

template <typename T>
class PrefillPass {
public:
    __aicore__ inline PrefillPass(AscendC::TPipe& pipe, const MultiLoraDeltaTiling& sizes, const Adapters& adapters)
        : sizes_(sizes), adapters_(adapters)
    {
        pipe.InitBuffer(in_, 2, kPassTile * sizeof(T));
        pipe.InitBuffer(out_, 2, kPassTile * sizeof(T));
    }

    // y = y0, or NaN, for this core's tokens.
    __aicore__ inline void Run(const Range& tokens, GM_ADDR y0, GM_ADDR y)
    {
        const AscendC::GlobalTensor<T> y0Gm = Global<T>(y0), yGm = Global<T>(y);
        for (uint32_t token = tokens.begin; token < tokens.end; ++token) {
            const int32_t slot = adapters_.SlotOf(token);
            for (uint32_t column = 0; slot < 0 && column < sizes_.out; column += kPassTile) {
                const uint64_t at = uint64_t{token} * sizes_.out + column;
                const uint32_t columns = Least(kPassTile, sizes_.out - column);
                Write(yGm[at], slot == Adapters::kNone ? Copied(y0Gm[at], columns) : NotANumber(), columns);
            }
        }
    }

private:
    using Local = AscendC::LocalTensor<T>;

    __aicore__ inline Local Copied(const AscendC::GlobalTensor<T>& y0, uint32_t columns)
    {
        Local row = in_.template AllocTensor<T>();
        CopyRowsIn(row, y0, 1, columns, columns);
        in_.EnQue(row);
        row = in_.template DeQue<T>();
        Local out = out_.template AllocTensor<T>();
        AscendC::DataCopy(out, row, PitchOf<T>(columns));
        in_.FreeTensor(row);
        return out;
    }

    // All bits but the sign.
    __aicore__ inline Local NotANumber()
    {
        Local out = out_.template AllocTensor<T>();
        AscendC::Duplicate(out.template ReinterpretCast<int16_t>(), static_cast<int16_t>(0x7fff), kPassTile);
        return out;
    }

    __aicore__ inline void Write(const AscendC::GlobalTensor<T>& y, Local out, uint32_t columns)
    {
        out_.EnQue(out);
        out = out_.template DeQue<T>();
        CopyRowsOut(y, out, 1, columns, columns);
        out_.FreeTensor(out);
    }

    const MultiLoraDeltaTiling& sizes_;
    const Adapters& adapters_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
};

}  // namespace mindlora
