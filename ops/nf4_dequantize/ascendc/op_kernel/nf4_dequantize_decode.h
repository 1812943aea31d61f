// NF4 to float on the vector cores. The blocks of all rows, one after the other, are dealt out evenly; a core takes its
// own tile by tile, and while one is decoded the next is on its way in and the last on its way out.
//
// A byte holds two codes and has 256 values: it is looked up as a whole, in one table for its low half and one for its
// high half, so that no byte is ever taken apart. See ../../README.md.
#pragma once

#include "ascendc_common/copy.h"
#include "ascendc_common/share.h"
#include "kernel_operator.h"
#include "nf4_dequantize_tiling.h"

namespace mindlora {

template <class T>
class Nf4Dequantize {
public:
    __aicore__ inline Nf4Dequantize(AscendC::TPipe& pipe, const Nf4DequantizeTiling& sizes) : sizes_(sizes)
    {
        pipe.InitBuffer(in_, 2, sizes.tile * (kBytes + 1));
        pipe.InitBuffer(out_, 2, sizes.tile * kBlock * sizeof(T));
        pipe.InitBuffer(halves_, sizes.tile * (kBytes + 1) * sizeof(half));
        pipe.InitBuffer(at_, sizes.tile * kBytes * sizeof(int32_t));
        pipe.InitBuffer(values_, sizes.tile * kBytes * sizeof(float));
        pipe.InitBuffer(absmax_, sizes.tile * sizeof(float));
        pipe.InitBuffer(spread_, sizes.tile * 32);
        pipe.InitBuffer(table_, 2 * kEntries * sizeof(float) + kTablePadding);
        if constexpr (!kIsFloat<T>) {
            pipe.InitBuffer(wide_, sizes.tile * kBlock * sizeof(float));
        }
    }

    __aicore__ inline void Bind(GM_ADDR codes, GM_ADDR absmax, GM_ADDR scales, GM_ADDR offsets, GM_ADDR w)
    {
        codesGm_ = Global<uint8_t>(codes);
        absmaxGm_ = Global<uint8_t>(absmax);
        scales_ = Global<float>(scales);
        offsets_ = Global<float>(offsets);
        w_ = Global<T>(w);
    }

    __aicore__ inline void Run()
    {
        FillTable();
        const Range mine = Share(sizes_.blocks, sizes_.unit, static_cast<uint32_t>(AscendC::GetBlockNum()),
            static_cast<uint32_t>(AscendC::GetBlockIdx()));
        Range tile{mine.begin, mine.begin};
        while (tile.end < mine.end) {
            // Up to a multiple of the tile, so that each tile is within one group.
            tile = TileOf(mine, tile.end, sizes_.tile - tile.end % sizes_.tile);
            Fetch(tile);
            Decode(tile);
            Store(tile);
        }
    }

private:
    static constexpr uint32_t kBlock = 64;     // numbers that share an absmax
    static constexpr uint32_t kBytes = 32;     // of the codes of a block: a data block
    static constexpr uint32_t kGroup = 256;    // blocks that share a scale and an offset
    static constexpr uint32_t kEntries = 256;  // of a table: the values of a byte
    // Never read: with 64 repeats, the check of Gather in CANN's CPU debugging wants a source of 2,272 bytes, although
    // no offset goes beyond these 2,048. It seems to test the wrong size.
    static constexpr uint32_t kTablePadding = 224;

    // Entry b of the first table is TABLE[b % 16], of the second TABLE[b / 16].
    __aicore__ inline void FillTable()
    {
        const AscendC::LocalTensor<float> table = table_.template Get<float>();
        for (uint32_t code = 0; code < 16; ++code) {
            uint64_t lane[2] = {uint64_t{1} << code, 0};
            AscendC::Duplicate(table, sizes_.table[code], lane, 16, 1, 2);
            AscendC::Duplicate(table[kEntries + code * 16], sizes_.table[code], 16);
        }
    }

    // The bytes of a tile: its codes, then its absmax.
    __aicore__ inline void Fetch(const Range& tile)
    {
        const uint32_t blocks = tile.Size();
        AscendC::LocalTensor<uint8_t> bytes = in_.template AllocTensor<uint8_t>();
        CopyRowsIn(bytes, codesGm_[uint64_t{tile.begin} * kBytes], 1, blocks * kBytes, blocks * kBytes);
        CopyRowsIn(bytes[blocks * kBytes], absmaxGm_[tile.begin], 1, blocks, blocks);
        in_.EnQue(bytes);
    }

    __aicore__ inline void Decode(const Range& tile)
    {
        const uint32_t blocks = tile.Size(), codes = blocks * kBytes;
        const AscendC::LocalTensor<half> halves = halves_.template Get<half>();
        AscendC::LocalTensor<uint8_t> bytes = in_.template DeQue<uint8_t>();
        AscendC::Cast(halves, bytes, AscendC::RoundMode::CAST_NONE, codes + PitchOf<float>(blocks));
        in_.FreeTensor(bytes);
        SpreadAbsmax(halves[codes], tile);

        // Offsets in bytes: 4 times the code, exact in half.
        const AscendC::LocalTensor<int32_t> at = at_.template Get<int32_t>();
        AscendC::Muls(halves, halves, static_cast<half>(4.0f), static_cast<int32_t>(codes));
        AscendC::Cast(at, halves, AscendC::RoundMode::CAST_RINT, codes);

        AscendC::LocalTensor<T> w = out_.template AllocTensor<T>();
        if constexpr (kIsFloat<T>) {
            LookUp(w, blocks);
        } else {
            const AscendC::LocalTensor<float> wide = wide_.template Get<float>();
            LookUp(wide, blocks);
            AscendC::Cast(w, wide, AscendC::RoundMode::CAST_RINT, blocks * kBlock);
        }
        out_.EnQue(w);
    }

    // A data block of absmax' = offset + scale * code for each block, rounded after each of the two.
    __aicore__ inline void SpreadAbsmax(const AscendC::LocalTensor<half>& codes, const Range& tile)
    {
        const uint32_t count = PitchOf<float>(tile.Size()), group = tile.begin / kGroup;
        const AscendC::LocalTensor<float> absmax = absmax_.template Get<float>();
        AscendC::Cast(absmax, codes, AscendC::RoundMode::CAST_NONE, count);
        AscendC::Muls(absmax, absmax, scales_.GetValue(group), static_cast<int32_t>(count));
        AscendC::Adds(absmax, absmax, offsets_.GetValue(group), static_cast<int32_t>(count));
        AscendC::Brcb(spread_.template Get<float>(), absmax, static_cast<uint8_t>(count / 8), {1, 8});
    }

    // Numbers 0 to 31 of each block are the low halves of its bytes, 32 to 63 the high halves.
    __aicore__ inline void LookUp(const AscendC::LocalTensor<float>& w, uint32_t blocks)
    {
        const AscendC::LocalTensor<float> table = table_.template Get<float>();
        const AscendC::LocalTensor<float> values = values_.template Get<float>();
        const AscendC::LocalTensor<uint32_t> at = at_.template Get<uint32_t>();
        const AscendC::LocalTensor<float> absmax = spread_.template Get<float>();
        for (uint32_t side = 0; side < 2; ++side) {
            AscendC::Gather(values, table, at, static_cast<uint32_t>(side * kEntries * sizeof(float)), blocks * kBytes);
            AscendC::Mul(w[side * kBytes], values, absmax, kBytes, static_cast<uint8_t>(blocks), {1, 1, 0, 8, 4, 1});
        }
    }

    // Rows of W end after the last column; where blocks end there too, all of W is one row.
    __aicore__ inline void Store(const Range& tile)
    {
        AscendC::LocalTensor<T> w = out_.template DeQue<T>();
        for (uint32_t block = tile.begin; block < tile.end;) {
            const uint64_t row = block / sizes_.rowBlocks, first = block % sizes_.rowBlocks, column = first * kBlock;
            const uint32_t blocks = Least(sizes_.rowBlocks - first, tile.end - block);
            const uint32_t columns = Least(uint64_t{blocks} * kBlock, sizes_.columns - column);
            CopyRowsOut(w_[row * sizes_.columns + column], w[(block - tile.begin) * kBlock], 1, columns, columns);
            block += blocks;
        }
        out_.FreeTensor(w);
    }

    const Nf4DequantizeTiling& sizes_;
    AscendC::TQue<AscendC::TPosition::VECIN, 1> in_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> out_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> halves_, at_, values_, absmax_, spread_, table_, wide_;
    AscendC::GlobalTensor<uint8_t> codesGm_, absmaxGm_;
    AscendC::GlobalTensor<float> scales_, offsets_;
    AscendC::GlobalTensor<T> w_;
};

}  // namespace mindlora
