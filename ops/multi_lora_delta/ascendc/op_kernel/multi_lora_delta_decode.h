// For few tokens, on vector cores alone: shrink along slices of K, add up the slices' parts, expand along slices of N.
// An adapter's A and B and each row are read once, by the core that has that slice.
#pragma once

#include "ascendc_common/exchange.h"
#include "multi_lora_delta_products.h"
#include "multi_lora_delta_shares.h"
#include "multi_lora_delta_tiles.h"

namespace mindlora {

template <class T>
class MultiLoraDeltaDecode {
public:
    __aicore__ inline MultiLoraDeltaDecode(const MultiLoraDeltaTiling& sizes, AscendC::TPipe& pipe)
        : sizes_(sizes), segments_(sizes), tiles_(sizes, segments_), pipe_(pipe)
    {}

    __aicore__ inline void SetArguments(GM_ADDR y0, GM_ADDR x, GM_ADDR pool, GM_ADDR ranks, GM_ADDR scales,
        GM_ADDR indices, GM_ADDR y, GM_ADDR workspace)
    {
        scales_.SetGlobalBuffer((__gm__ float*)scales);
        sums_.SetGlobalBuffer((__gm__ float*)workspace);
        parts_ = sums_[sizes_.sums];
        segments_.SetArguments(pipe_, ranks, indices);
        tiles_.SetArguments(pipe_, y0, x, pool, y);
        pipe_.InitBuffer(lowQueue_, 1, kDecodeTile * sizeof(float));
        pipe_.InitBuffer(scratch_, kDecodeTile * sizeof(float));
    }

    __aicore__ inline void Run()
    {
        for (uint64_t start = 0; start < sizes_.tokens; start += sizes_.round) {
            segments_.Read(start, Least(sizes_.round, sizes_.tokens - start));
            const uint64_t cores = CoresFor(segments_, sizes_, sizeof(T));
            shrink_.Deal(segments_, sizes_.in, 1, false, cores);
            expand_.Deal(segments_, sizes_.out, 2, true, cores);
            ShrinkAll();
            FetchAhead();
            AscendC::SyncAll();
            SumAll();
            AscendC::SyncAll();
            ExpandAll();
        }
    }

private:
    using Local = AscendC::LocalTensor<T>;
    using LocalFloat = AscendC::LocalTensor<float>;

    // How many rows of the pool are multiplied together: a multiple of 8, so that their products start at data blocks.
    __aicore__ inline uint32_t RanksAt(const Tile& tile) const
    {
        return Least(kDecodeRanks, kDecodeTile / tile.pitch / kBlockNumbers * kBlockNumbers);
    }

    // The same for expand, where each number of low takes a data block of the scratch.
    __aicore__ inline uint32_t RanksAt(const Tile& tile, uint32_t rows) const
    {
        return Least(RanksAt(tile), kDecodeTile / kBlockNumbers / rows / kBlockNumbers * kBlockNumbers);
    }

    __aicore__ inline void ShrinkAll()
    {
        uint64_t at = 0, part = 0, first = 0;
        for (uint32_t i = 0; i < segments_.Count(); ++i) {
            const Segment segment = segments_.At(i);
            const uint32_t cores = shrink_.Cores(segment, at, first);
            const Range mine = shrink_.Mine(segment, at);
            if (mine.Size() > 0) {
                const uint64_t before = static_cast<uint64_t>(AscendC::GetBlockIdx()) - first;
                Shrink(segment, mine.begin, mine.end, part + before * segment.Space());
            }
            at += shrink_.LengthOf(segment);
            part += cores * segment.Space();
        }
    }

    // parts[part + j * rows + m] = x[m] . A[j] over the columns [begin, end)
    __aicore__ inline void Shrink(const Segment& segment, uint32_t begin, uint32_t end, uint64_t part)
    {
        const uint32_t rows = segment.Rows();
        LocalFloat low = tiles_.outQueue.template AllocTensor<float>();
        const LocalFloat scratch = scratch_.template Get<float>();
        const LocalFloat more = scratch[kDecodeRanks * kLanes];
        for (uint32_t from = begin; from < end; from += tiles_.At(segment, from, end).width) {
            const Tile tile = tiles_.At(segment, from, end);
            Local x = tiles_.ReadX(segment, tile);
            const LocalFloat wideX = tiles_.WideRows(x, rows * tile.pitch);
            const uint32_t most = RanksAt(tile);
            for (uint32_t j = 0; j < segment.Rank(); j += most) {
                const uint32_t ranks = Least(most, segment.Rank() - j);
                tiles_.FetchPool(segment, j, ranks, 0, tile);
                Local a = tiles_.TakePool();
                ShrinkTile(from == begin ? low[j * rows] : more, wideX, tiles_.WidePool(a, ranks * tile.pitch), scratch,
                    rows, ranks, tile.width, tile.pitch);
                if (from != begin) {
                    AscendC::Add(low[j * rows], low[j * rows], more, static_cast<int32_t>(ranks * rows));
                }
                tiles_.poolQueue.FreeTensor(a);
            }
            tiles_.rowQueue.FreeTensor(x);
        }
        tiles_.WriteNumbers(parts_[part], low, segment.Numbers());
    }

    // The first tile of B that this core will need arrives while the cores exchange their sums.
    __aicore__ inline void FetchAhead()
    {
        uint64_t at = 0;
        for (uint32_t i = 0; i < segments_.Count() && !fetched_; ++i) {
            const Segment segment = segments_.At(i);
            const Range mine = expand_.Mine(segment, at);
            if (segment.rank > 0 && mine.Size() > 0) {
                const Tile tile = tiles_.At(segment, mine.begin, mine.end);
                tiles_.FetchPool(segment, 0, Least(RanksAt(tile, segment.Rows()), segment.Rank()), sizes_.in, tile);
                fetched_ = true;
            }
            at += expand_.LengthOf(segment);
        }
    }

    __aicore__ inline void SumAll()
    {
        uint64_t numbers = 0;
        for (uint32_t i = 0; i < segments_.Count(); ++i) {
            numbers += segments_.At(i).Space();
        }
        const Range mine = Share(static_cast<uint32_t>(numbers), kBlockNumbers,
            static_cast<uint32_t>(AscendC::GetBlockNum()), static_cast<uint32_t>(AscendC::GetBlockIdx()));
        uint64_t at = 0, part = 0, sum = 0, first = 0;
        for (uint32_t i = 0; i < segments_.Count() && sum < mine.end; ++i) {
            const Segment segment = segments_.At(i);
            const uint32_t cores = shrink_.Cores(segment, at, first);
            const uint64_t from = mine.begin > sum ? mine.begin : sum;
            const uint64_t to = Least(mine.end, sum + segment.Numbers());
            if (from < to) {
                Sum(segment, cores, part + from - sum, from, static_cast<uint32_t>(to - from));
            }
            at += shrink_.LengthOf(segment);
            part += cores * segment.Space();
            sum += segment.Space();
        }
    }

    // sums[sum + i] = scale * (parts[part + i] + parts[part + i + Space()] + ...) for `count` numbers
    __aicore__ inline void Sum(const Segment& segment, uint32_t cores, uint64_t part, uint64_t sum, uint32_t count)
    {
        const float scale = scales_.GetValue(static_cast<uint64_t>(segment.slot));
        const uint32_t most = kDecodeTile / cores / kBlockNumbers * kBlockNumbers;
        for (uint32_t done = 0; done < count; done += most) {
            const uint32_t numbers = Least(most, count - done);
            LocalFloat parts = tiles_.rowQueue.template AllocTensor<float>();
            CopyRowsIn(parts, parts_[part + done], cores, numbers, segment.Space());
            tiles_.rowQueue.EnQue(parts);
            parts = tiles_.rowQueue.template DeQue<float>();
            AddRowsUp(parts, cores, PitchOf<float>(numbers));
            LocalFloat scaled = tiles_.outQueue.template AllocTensor<float>();
            AscendC::Muls(scaled, parts, scale, static_cast<int32_t>(numbers));
            tiles_.rowQueue.FreeTensor(parts);
            tiles_.WriteNumbers(sums_[sum + done], scaled, numbers);
        }
    }

    __aicore__ inline void ExpandAll()
    {
        uint64_t at = 0, sum = 0;
        for (uint32_t i = 0; i < segments_.Count(); ++i) {
            const Segment segment = segments_.At(i);
            const Range mine = expand_.Mine(segment, at);
            if (mine.Size() > 0 && segment.rank > 0) {
                Expand(segment, mine.begin, mine.end, sum);
            } else if (mine.Size() > 0) {
                Pass(segment, mine.begin, mine.end);
            }
            at += expand_.LengthOf(segment);
            sum += segment.Space();
        }
    }

    // y[m, n] = y0[m, n] + sum over j of sums[sum + j * rows + m] * B[n, j] for the columns [begin, end)
    __aicore__ inline void Expand(const Segment& segment, uint32_t begin, uint32_t end, uint64_t sum)
    {
        const uint32_t rows = segment.Rows();
        LocalFloat low = lowQueue_.template AllocTensor<float>();
        CopyRowsIn(low, sums_[sum], 1, segment.Numbers(), segment.Numbers());
        lowQueue_.EnQue(low);
        low = lowQueue_.template DeQue<float>();
        const LocalFloat spread = scratch_.template Get<float>();  // each number of low in a data block of its own
        for (uint32_t from = begin; from < end; from += tiles_.At(segment, from, end).width) {
            const Tile tile = tiles_.At(segment, from, end);
            Local y0 = tiles_.ReadY0(segment, tile);
            const LocalFloat y = tiles_.WideRows(y0, rows * tile.pitch);
            const uint32_t most = RanksAt(tile, rows);
            for (uint32_t j = 0; j < segment.Rank(); j += most) {
                const uint32_t ranks = Least(most, segment.Rank() - j);
                const uint32_t eights = (ranks * rows + kBlockNumbers - 1) / kBlockNumbers;
                AscendC::Brcb(spread, low[j * rows], static_cast<uint8_t>(eights), AscendC::BrcbRepeatParams(1, 8));
                if (!fetched_) {
                    tiles_.FetchPool(segment, j, ranks, sizes_.in, tile);
                }
                fetched_ = false;
                Local b = tiles_.TakePool();
                ExpandTile(y, spread, tiles_.WidePool(b, ranks * tile.pitch), rows, ranks, tile.width, tile.pitch);
                tiles_.poolQueue.FreeTensor(b);
            }
            Local out = tiles_.outQueue.template AllocTensor<T>();
            Narrow(out, y, rows * tile.pitch);
            tiles_.rowQueue.FreeTensor(y0);
            tiles_.WriteY(segment, tile, out);
        }
        lowQueue_.FreeTensor(low);
    }

    // Rows that no adapter changes, and rows that name a slot that does not exist.
    __aicore__ inline void Pass(const Segment& segment, uint32_t begin, uint32_t end)
    {
        for (uint32_t from = begin; from < end; from += tiles_.At(segment, from, end).width) {
            const Tile tile = tiles_.At(segment, from, end);
            const uint32_t numbers = segment.Rows() * tile.pitch;
            Local out = tiles_.outQueue.template AllocTensor<T>();
            if (segment.rank == 0) {
                Local y0 = tiles_.ReadY0(segment, tile);
                AscendC::DataCopy(out, y0, numbers);
                tiles_.rowQueue.FreeTensor(y0);
            } else {  // all bits but the sign: a NaN in every type
                AscendC::Duplicate(out.template ReinterpretCast<int16_t>(), static_cast<int16_t>(0x7fff),
                    static_cast<int32_t>(numbers * sizeof(T) / sizeof(int16_t)));
            }
            tiles_.WriteY(segment, tile, out);
        }
    }

    const MultiLoraDeltaTiling& sizes_;
    Segments segments_;
    Tiles<T> tiles_;
    Shares shrink_, expand_;
    bool fetched_ = false;  // by FetchAhead
    AscendC::TPipe& pipe_;
    AscendC::GlobalTensor<float> scales_, sums_, parts_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> lowQueue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> scratch_;
};

}  // namespace mindlora
