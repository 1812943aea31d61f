// The tiles that move between global memory and UB.
#pragma once

#include "ascendc_common/copy.h"
#include "ascendc_common/share.h"
#include "multi_lora_delta_segments.h"

namespace mindlora {

// Some columns of a segment's rows.
struct Tile {
    uint32_t from;
    uint32_t width;
    uint32_t pitch;  // from row to row in UB
};

template <class T>
class Tiles {
public:
    using Local = AscendC::LocalTensor<T>;
    using LocalFloat = AscendC::LocalTensor<float>;

    __aicore__ inline Tiles(const MultiLoraDeltaTiling& sizes, const Segments& segments)
        : sizes_(sizes), segments_(segments)
    {}

    __aicore__ inline void SetArguments(AscendC::TPipe& pipe, GM_ADDR y0, GM_ADDR x, GM_ADDR pool, GM_ADDR y)
    {
        y0_.SetGlobalBuffer((__gm__ T*)y0);
        x_.SetGlobalBuffer((__gm__ T*)x);
        pool_.SetGlobalBuffer((__gm__ T*)pool);
        y_.SetGlobalBuffer((__gm__ T*)y);
        pipe.InitBuffer(poolQueue, 2, kDecodeTile * sizeof(T));
        pipe.InitBuffer(rowQueue, 2, kBytes);
        pipe.InitBuffer(outQueue, 2, kBytes);
        pipe.InitBuffer(wideRows_, kBytes);
        if constexpr (!kIsFloat<T>) {
            pipe.InitBuffer(widePool_, kBytes);
        }
    }

    // The columns from `from` on, of those up to `end`.
    __aicore__ inline Tile At(const Segment& segment, uint32_t from, uint32_t end) const
    {
        constexpr uint32_t block = 32 / sizeof(T);
        const uint32_t most = Least(kDecodeWidth, kDecodeTile / segment.Rows() / block * block);
        const uint32_t width = Least(most, end - from);
        return {from, width, PitchOf<T>(width)};
    }

    __aicore__ inline Local ReadX(const Segment& segment, const Tile& tile)
    {
        return Read(x_, sizes_.in, segment, tile);
    }

    __aicore__ inline Local ReadY0(const Segment& segment, const Tile& tile)
    {
        return Read(y0_, sizes_.out, segment, tile);
    }

    __aicore__ inline void WriteY(const Segment& segment, const Tile& tile, Local& rows)
    {
        outQueue.EnQue(rows);
        rows = outQueue.template DeQue<T>();
        int32_t token = segment.first;
        for (uint32_t m = 0, run; m < segment.Rows(); m += run) {
            const uint64_t at = (segments_.Start() + token) * sizes_.out + tile.from;
            run = segments_.Run(token, segment.Rows() - m);
            CopyRowsOut(y_[at], rows[m * tile.pitch], run, tile.width, sizes_.out);
        }
        outQueue.FreeTensor(rows);
    }

    // Rows [j, j + ranks) of an adapter to the queue; `side` is 0 for A and K for B.
    __aicore__ inline void FetchPool(
        const Segment& segment, uint32_t j, uint32_t ranks, uint32_t side, const Tile& tile)
    {
        const uint64_t length = uint64_t{sizes_.in} + sizes_.out;
        const uint64_t row = static_cast<uint64_t>(segment.slot) * sizes_.maxRank + j;
        Local rows = poolQueue.template AllocTensor<T>();
        CopyRowsIn(rows, pool_[row * length + side + tile.from], ranks, tile.width, length);
        poolQueue.EnQue(rows);
    }

    __aicore__ inline Local TakePool() { return poolQueue.template DeQue<T>(); }

    // As float32: in a buffer of their own, or in place if they are float32 already.
    __aicore__ inline LocalFloat WideRows(const Local& rows, uint32_t count)
    {
        return Widened(rows, wideRows_.template Get<float>(), count);
    }

    __aicore__ inline LocalFloat WidePool(const Local& rows, uint32_t count)
    {
        if constexpr (kIsFloat<T>) {
            return rows;
        } else {
            return Widened(rows, widePool_.template Get<float>(), count);
        }
    }

    __aicore__ inline void WriteNumbers(const AscendC::GlobalTensor<float>& to, LocalFloat& numbers, uint32_t count)
    {
        outQueue.EnQue(numbers);
        numbers = outQueue.template DeQue<float>();
        CopyRowsOut(to, numbers, 1, count, count);
        outQueue.FreeTensor(numbers);
    }

    // Who uses a tile that was read frees it.
    AscendC::TQue<AscendC::TPosition::VECIN, 1> poolQueue, rowQueue;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> outQueue;

private:
    static constexpr uint32_t kBytes = kDecodeTile * sizeof(float);

    // Rows of x or y0, `length` numbers each. Those that follow one another move in one copy.
    __aicore__ inline Local Read(
        const AscendC::GlobalTensor<T>& from, uint32_t length, const Segment& segment, const Tile& tile)
    {
        Local rows = rowQueue.template AllocTensor<T>();
        int32_t token = segment.first;
        for (uint32_t m = 0, run; m < segment.Rows(); m += run) {
            const uint64_t at = (segments_.Start() + token) * length + tile.from;
            run = segments_.Run(token, segment.Rows() - m);
            CopyRowsIn(rows[m * tile.pitch], from[at], run, tile.width, length);
        }
        rowQueue.EnQue(rows);
        return rowQueue.template DeQue<T>();
    }

    const MultiLoraDeltaTiling& sizes_;
    const Segments& segments_;
    AscendC::GlobalTensor<T> y0_, x_, pool_, y_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> wideRows_, widePool_;
};

}  // namespace mindlora
