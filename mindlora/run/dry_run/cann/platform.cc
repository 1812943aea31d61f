// What MindSpore asks about the chip when it fuses operators and plans its own kernels: a 910B with 24 cores.
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {
constexpr uint32_t kCubeCores = 24;
constexpr uint32_t kVectorCores = 48;
}  // namespace

namespace fe {

enum class LocalMemType { L0_A = 0, L0_B = 1, L0_C = 2, L1 = 3, L2 = 4, UB = 5, HBM = 6 };

struct OptionalInfos {};

struct PlatFormInfos {
    uint32_t GetCoreNum() const;
    void SetCoreNumByCoreType(const std::string& type);
    void GetLocalMemSize(const LocalMemType& type, uint64_t& bytes);
    void GetLocalMemBw(const LocalMemType& type, uint64_t& bandwidth);
    bool GetPlatformResWithLock(const std::string& group, const std::string& key, std::string& value);
};

uint32_t PlatFormInfos::GetCoreNum() const { return kCubeCores; }

void PlatFormInfos::SetCoreNumByCoreType(const std::string&) {}

void PlatFormInfos::GetLocalMemSize(const LocalMemType& type, uint64_t& bytes)
{
    static const std::map<LocalMemType, uint64_t> kilobytes = {{LocalMemType::L0_A, 64}, {LocalMemType::L0_B, 64},
        {LocalMemType::L0_C, 128}, {LocalMemType::L1, 512}, {LocalMemType::L2, 192 << 10}, {LocalMemType::UB, 192},
        {LocalMemType::HBM, 64 << 20}};
    const auto found = kilobytes.find(type);
    bytes = found == kilobytes.end() ? 0 : found->second << 10;
}

void PlatFormInfos::GetLocalMemBw(const LocalMemType&, uint64_t& bandwidth) { bandwidth = 64; }

bool PlatFormInfos::GetPlatformResWithLock(const std::string&, const std::string& key, std::string& value)
{
    static const std::map<std::string, std::string> known = {{"ai_core_cnt", std::to_string(kCubeCores)},
        {"cube_core_cnt", std::to_string(kCubeCores)}, {"vector_core_cnt", std::to_string(kVectorCores)},
        {"ub_size", "196608"}};
    const auto found = known.find(key);
    value = found == known.end() ? "0" : found->second;
    return true;
}

struct PlatformInfoManager {
    static PlatformInfoManager& GeInstance();
    static PlatformInfoManager& Instance();
    uint32_t GetRuntimePlatformInfosByDevice(const uint32_t& device, PlatFormInfos& infos, bool);
    uint32_t GetPlatformInfos(std::string name, PlatFormInfos& infos, OptionalInfos& optional);
    uint32_t InitRuntimePlatformInfos(const std::string& name);
};

PlatformInfoManager& PlatformInfoManager::GeInstance()
{
    static PlatformInfoManager only;
    return only;
}

PlatformInfoManager& PlatformInfoManager::Instance() { return GeInstance(); }
uint32_t PlatformInfoManager::GetRuntimePlatformInfosByDevice(const uint32_t&, PlatFormInfos&, bool) { return 0; }
uint32_t PlatformInfoManager::GetPlatformInfos(std::string, PlatFormInfos&, OptionalInfos&) { return 0; }
uint32_t PlatformInfoManager::InitRuntimePlatformInfos(const std::string&) { return 0; }

}  // namespace fe

extern "C" {

const char* aclrtGetSocName();

int rtGetSocVersion(char* name, uint32_t size)
{
    std::snprintf(name, size, "%s", aclrtGetSocName());
    return 0;
}

int rtGetC2cCtrlAddr(uint64_t* address, uint32_t* bytes)
{
    *address = 0x1000;
    *bytes = 64;
    return 0;
}

int rtGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t* value)
{
    *value = kCubeCores;
    return 0;
}

int aclrtGetResInCurrentThread(int type, uint32_t* cores)
{
    *cores = type == 1 ? kVectorCores : kCubeCores;
    return 0;
}
}
