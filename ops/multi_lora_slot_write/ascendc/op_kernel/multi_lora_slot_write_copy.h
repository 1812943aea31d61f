// One contiguous copy, dealt out to the vector cores; the first of them writes the three numbers too.
#pragma once

#include "kernel_operator.h"
#include "multi_lora_slot_write_tiling.h"

namespace mindlora {

template <class T>
class MultiLoraSlotWrite {
public:
    __aicore__ inline MultiLoraSlotWrite(const MultiLoraSlotWriteTiling& sizes, AscendC::TPipe& pipe) : sizes_(sizes)
    {
        pipe.InitBuffer(copies_, 2, sizes.tile * sizeof(T));
        pipe.InitBuffer(numbers_, 1, kBlockBytes);
    }

    __aicore__ inline void SetArguments(
        GM_ADDR pool, GM_ADDR ranks, GM_ADDR scales, GM_ADDR slot, GM_ADDR packed, GM_ADDR scale, GM_ADDR written)
    {
        pool_.SetGlobalBuffer((__gm__ T*)pool);
        ranks_.SetGlobalBuffer((__gm__ int32_t*)ranks);
        scales_.SetGlobalBuffer((__gm__ float*)scales);
        slot_.SetGlobalBuffer((__gm__ int32_t*)slot);
        packed_.SetGlobalBuffer((__gm__ T*)packed);
        scale_.SetGlobalBuffer((__gm__ float*)scale);
        written_.SetGlobalBuffer((__gm__ int32_t*)written);
    }

    __aicore__ inline void Run()
    {
        const int32_t slot = slot_.GetValue(0);
        const bool exists = slot >= 0 && static_cast<uint32_t>(slot) < sizes_.slots;
        if (exists) {
            CopyShare(static_cast<uint64_t>(slot) * sizes_.block);
        }
        if (AscendC::GetBlockIdx() != 0) {
            return;
        }
        if (exists) {
            Copy(scales_[slot], scale_, 1);
            Write(ranks_[slot], static_cast<int32_t>(sizes_.rank));
        }
        Write(written_, exists ? slot : -1);
    }

private:
    static constexpr uint32_t kBlockBytes = 32;

    // This core's share of the rows, in whole units; `to` is where the slot's block starts.
    __aicore__ inline void CopyShare(uint64_t to)
    {
        const uint64_t units = (sizes_.count + sizes_.unit - 1) / sizes_.unit;
        const uint64_t cores = static_cast<uint64_t>(AscendC::GetBlockNum());
        const uint64_t me = static_cast<uint64_t>(AscendC::GetBlockIdx());
        const uint64_t cut = (me + 1) * units / cores * sizes_.unit;
        const uint64_t end = cut < sizes_.count ? cut : sizes_.count;
        for (uint64_t at = me * units / cores * sizes_.unit; at < end; at += sizes_.tile) {
            Copy(pool_[to + at], packed_[at], static_cast<uint32_t>(end - at < sizes_.tile ? end - at : sizes_.tile));
        }
    }

    template <class U>
    __aicore__ inline void Copy(
        const AscendC::GlobalTensor<U>& to, const AscendC::GlobalTensor<U>& from, uint32_t count)
    {
        const AscendC::DataCopyExtParams whole(1, static_cast<uint32_t>(count * sizeof(U)), 0, 0, 0);
        AscendC::LocalTensor<U> tile = copies_.template AllocTensor<U>();
        AscendC::DataCopyPad(tile, from, whole, AscendC::DataCopyPadExtParams<U>(false, 0, 0, U()));
        copies_.EnQue(tile);
        tile = copies_.template DeQue<U>();
        AscendC::DataCopyPad(to, tile, whole);
        copies_.FreeTensor(tile);
    }

    // One number by DMA: what the scalar unit writes stays in its data cache until that is flushed.
    __aicore__ inline void Write(const AscendC::GlobalTensor<int32_t>& to, int32_t number)
    {
        AscendC::LocalTensor<int32_t> block = numbers_.template AllocTensor<int32_t>();
        AscendC::Duplicate(block, number, static_cast<int32_t>(kBlockBytes / sizeof(int32_t)));
        numbers_.EnQue(block);
        block = numbers_.template DeQue<int32_t>();
        AscendC::DataCopyPad(to, block, AscendC::DataCopyExtParams(1, sizeof(int32_t), 0, 0, 0));
        numbers_.FreeTensor(block);
    }

    const MultiLoraSlotWriteTiling& sizes_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1> copies_;
    AscendC::TQue<AscendC::TPosition::VECOUT, 1> numbers_;
    AscendC::GlobalTensor<T> pool_, packed_;
    AscendC::GlobalTensor<int32_t> ranks_, slot_, written_;
    AscendC::GlobalTensor<float> scales_, scale_;
};

}  // namespace mindlora
