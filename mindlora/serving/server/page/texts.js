// All that the page says, in its two languages.
const TEXTS = {
  en: {
    fresh: "New chat", key: "Key", panel: "Settings", settings: "Settings", server: "Server",
    left: "Model", right: "Model to compare with", compare: "Compare", one: "Do not compare",
    hint: "Both models get the same prompt, and each goes on with its own answers.",
    prompt: "Message", send: "Send", stop: "Stop", keys: "Enter sends · Shift+Enter: new line · Esc stops",
    system: "System prompt", temperature: "Temperature", max_tokens: "Most tokens", seed: "Seed", room: "no limit",
    all: "all", random: "random", more: "More", repetition_penalty: "Repetition penalty",
    presence_penalty: "Presence penalty", frequency_penalty: "Frequency penalty", reasoning_effort: "Thinking",
    as_trained: "default", stop_texts: "Stop at these texts, one a line", tools: "Tools, as JSON",
    model: "Model", requests: "Requests", tokens: "Tokens",
    key_title: "This server asks for a key", key_kept: "It stays in this tab, and is forgotten when you close it.",
    cancel: "Cancel", use_key: "Use this key", result: "Result", give_results: "Go on with the results",
    thinking: "Thinking …", thought: "Thought", nothing: "(nothing)", stopped: "stopped", length: "cut off: no more tokens allowed",
    complete: "The answer is complete.", ready: "ready", connecting: "connecting …",
    unreachable: (error) => `The server cannot be reached: ${error}. Start it, or look at the network.`,
    broken: "The connection ended before the answer did: ask again.",
    not_tools: (error) => `Not a list of tools in JSON: ${error}`,
    not_enforced: (parts) => `Not enforced: ${parts}`,
    count: (count) => `${count} ${count === "1" ? "token" : "tokens"}`, rate: (rate) => `${rate} tokens/s`,
    first: (seconds) => `first after ${seconds} s`,
    cached: (cached, prompt) => `${cached} of ${prompt} prompt tokens cached`,
    running: "Requests running", waiting: "Waiting in the queue", speed: "Tokens per second", slots: "Slots in use",
    held: "Slots that hold an adapter", registered: "Adapters", memory: "Adapters in memory", blocks: "Cache blocks in use",
    reused: "Prompt tokens from the cache", of: (part, all) => `${part} of ${all}`,
    in_memory: (count, size) => `${count} (${size})`,
  },
  zh: {
    fresh: "新对话", key: "密钥", panel: "设置", settings: "设置", server: "服务器",
    left: "模型", right: "对比模型", compare: "对比", one: "取消对比",
    hint: "两个模型收到同样的提示，各自延续自己的回答。",
    prompt: "消息", send: "发送", stop: "停止", keys: "Enter 发送 · Shift+Enter 换行 · Esc 停止",
    system: "系统提示", temperature: "温度", max_tokens: "最多 token 数", seed: "随机种子", room: "不限",
    all: "全部", random: "随机", more: "更多", repetition_penalty: "重复惩罚",
    presence_penalty: "出现惩罚", frequency_penalty: "频率惩罚", reasoning_effort: "思考",
    as_trained: "默认", stop_texts: "遇到这些文本时停止，每行一个", tools: "工具（JSON）",
    model: "模型", requests: "请求", tokens: "token",
    key_title: "此服务器需要密钥", key_kept: "密钥只保存在此标签页中，关闭后即被清除。",
    cancel: "取消", use_key: "使用此密钥", result: "结果", give_results: "提交结果并继续",
    thinking: "思考中…", thought: "思考过程", nothing: "（无内容）", stopped: "已停止", length: "已截断：达到 token 上限",
    complete: "回答完毕。", ready: "就绪", connecting: "连接中…",
    unreachable: (error) => `无法连接服务器：${error}。请启动服务器或检查网络。`,
    broken: "回答未完成时连接中断，请重新提问。",
    not_tools: (error) => `不是 JSON 格式的工具列表：${error}`,
    not_enforced: (parts) => `未强制执行：${parts}`,
    count: (count) => `${count} 个 token`, rate: (rate) => `${rate} token/秒`,
    first: (seconds) => `首个 token ${seconds} 秒`,
    cached: (cached, prompt) => `提示的 ${prompt} 个 token 中 ${cached} 个来自缓存`,
    running: "运行中的请求", waiting: "排队的请求", speed: "每秒 token 数", slots: "使用中的插槽",
    held: "已载入适配器的插槽", registered: "适配器", memory: "内存中的适配器", blocks: "使用中的缓存块",
    reused: "来自缓存的提示 token", of: (part, all) => `${part} / ${all}`,
    in_memory: (count, size) => `${count}（${size}）`,
  },
};
const LANGUAGE = navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
const say = TEXTS[LANGUAGE];

// Writes the page's own texts where its attributes name them.
function writeTexts(root) {
  for (const element of root.querySelectorAll("[data-text]")) element.textContent = say[element.dataset.text];
  for (const element of root.querySelectorAll("[data-label]")) element.setAttribute("aria-label", say[element.dataset.label]);
  for (const element of root.querySelectorAll("[data-placeholder]")) element.placeholder = say[element.dataset.placeholder];
}

function number(value, digits = 0) {
  return value.toLocaleString(LANGUAGE, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
