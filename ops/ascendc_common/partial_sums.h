// The vector cores add up the partial sums that the cube cores wrote.
#pragma once

#include "ascendc_common/copy.h"
#include "ascendc_common/exchange.h"
#include "ascendc_common/prefill_exchange.h"
#include "ascendc_common/share.h"

namespace mindlora {

template <typename T>
class PartialSums {
public:
    // tile: how many numbers are added at a time, a multiple of 16.
    __aicore__ inline PartialSums(
        AscendC::TPipe& pipe, const PrefillExchange<T>& exchange, uint32_t slices, uint32_t tile)
        : exchange_(exchange), slices_(slices), tile_(tile)
    {
        pipe.InitBuffer(partials_, 2, slices * tile * sizeof(float));
        pipe.InitBuffer(low_, 2, tile * sizeof(T));
    }

    // low = the sum of the partials times scale, for the numbers [begin, end) of low.
    __aicore__ inline void Reduce(const Range& numbers, float scale)
    {
        for (uint32_t at = numbers.begin; at < numbers.end; at += tile_) {
            ReduceTile(at, Least(tile_, numbers.end - at), scale);
        }
    }

private:
    __aicore__ inline void ReduceTile(uint32_t at, uint32_t count, float scale)
    {
        AscendC::LocalTensor<float> partials = partials_.template AllocTensor<float>();
        CopyRowsIn(partials, exchange_.partials[at], slices_, count, exchange_.stride);
        partials_.EnQue(partials);
        partials = partials_.template DeQue<float>();
        AddRowsUp(partials, slices_, PitchOf<float>(count));
        AscendC::Muls(partials, partials, scale, static_cast<int32_t>(count));
        AscendC::LocalTensor<T> low = low_.template AllocTensor<T>();
        AscendC::Cast(low, partials, AscendC::RoundMode::CAST_RINT, count);
        partials_.FreeTensor(partials);
        low_.EnQue(low);
        low = low_.template DeQue<T>();
        CopyRowsOut(exchange_.low[at], low, 1, count, count);
        low_.FreeTensor(low);
    }

    const PrefillExchange<T>& exchange_;
    const uint32_t slices_;
    const uint32_t tile_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> partials_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> low_;
};

}  // namespace mindlora
