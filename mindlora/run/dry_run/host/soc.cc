// Tells MindSpore which NPU the dry run stands for: MindSpore's own simulation calls it "".
#include <memory>
#include <string>

namespace mindspore {
class MsContext {
public:
    static std::shared_ptr<MsContext> GetInstance();
    std::string ascend_soc_version() const;
    void set_ascend_soc_version(const std::string& version);
    void set_ascend_soc_name(const std::string& name);
};
}  // namespace mindspore

extern "C" void MindLoraSimulateSoc(const char* version, const char* name)
{
    const auto context = mindspore::MsContext::GetInstance();
    // The first question sets the simulation's own answer; after it, ours stays.
    static_cast<void>(context->ascend_soc_version());
    context->set_ascend_soc_version(version);
    context->set_ascend_soc_name(name);
}
