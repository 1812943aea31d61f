// The class from which the kernels that come with MindSpore derive what they plan, and which turns it into bytes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace optiling {

struct FieldInfo {
    const char* type;
    const char* name;
    size_t size;
};

// The derived classes write through these fields: their order is given.
class TilingDef {
public:
    void SaveToBuffer(void* target, size_t bytes);
    size_t GetDataSize() const;
    void CheckAlignAndGenPlaceHolder(const char* field, size_t alignment);

protected:
    void InitData();

    std::vector<FieldInfo> fields_;
    uint8_t* data_;
    size_t bytes_;
};

void TilingDef::InitData()
{
    constexpr size_t kSpare = 64;
    data_ = new uint8_t[bytes_ + kSpare]();
}

void TilingDef::CheckAlignAndGenPlaceHolder(const char*, size_t alignment)
{
    if (alignment > 1 && bytes_ % alignment != 0) bytes_ += alignment - bytes_ % alignment;
}

void TilingDef::SaveToBuffer(void* target, size_t bytes)
{
    if (data_ != nullptr && bytes_ <= bytes) std::memcpy(target, data_, bytes_);
}

size_t TilingDef::GetDataSize() const { return bytes_; }

struct CTilingDataClassFactory {
    static CTilingDataClassFactory& GetInstance();
    void RegisterTilingData(const char* name, std::shared_ptr<TilingDef> (*make)());
};

CTilingDataClassFactory& CTilingDataClassFactory::GetInstance()
{
    static CTilingDataClassFactory only;
    return only;
}

void CTilingDataClassFactory::RegisterTilingData(const char*, std::shared_ptr<TilingDef> (*)()) {}

}  // namespace optiling
