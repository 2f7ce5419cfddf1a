"""The architectures of the survey: how each is built, small and with random weights, and what it is fed.

An entry is a function that gives a module and its inputs. Sizes are small so that the whole list runs on a laptop; the
operators are those of the full model. `batch` is the number of rows that the export has.
"""

import dataclasses
import typing

import torch

# Words of a text, classes of an image.
VOCABULARY, CLASSES = 101, 10


@dataclasses.dataclass
class Architecture:
    """One model of the list."""

    name: str
    family: str
    # batch -> (module, inputs by name)
    build: typing.Callable
    # Whether three steps of training are compared with PyTorch.
    trains: bool = False
    # How it is trained: by its own loss ("output"), or by a loss on its first output.
    loss: str = "cross-entropy"
    # Step length: batch statistics of few examples make large steps chaotic.
    rate: float = 0.01
    # Whether losses of a run are compared with those of the same run under another plan instead.
    repeats: bool = False


ALL = {}


def add(name, family, build, **rest):
    ALL[name] = Architecture(name, family, build, **rest)


def image(batch, size, channels=3):
    return torch.randn(batch, channels, size, size)


def words(batch, length, vocabulary=VOCABULARY):
    return torch.randint(1, vocabulary, (batch, length))


# --- torchvision -----------------------------------------------------------------------------------------------------


def torchvision(name, family, size=224, trains=False, shape=None, rate=1e-3, **settings):
    def build(batch):
        import torchvision.models as zoo

        module = zoo.get_model(name, weights=None, **{"num_classes": CLASSES, **settings})
        x = torch.randn(batch, *shape) if shape else image(batch, size)
        return module, {"x": x}

    add(f"torchvision/{name}", family, build, trains=trains, rate=rate)


for name, family, size, settings in [
    ("alexnet", "convolution", 224, {}),
    ("vgg11", "convolution", 64, {}),
    ("vgg16_bn", "convolution", 64, {}),
    ("squeezenet1_1", "convolution", 64, {}),
    ("googlenet", "convolution", 64, {"aux_logits": False, "init_weights": False}),
    ("inception_v3", "convolution", 299, {"init_weights": False, "aux_logits": False}),
    ("densenet121", "convolution", 64, {}),
    ("resnet50", "convolution", 64, {}),
    ("resnext50_32x4d", "convolution", 64, {}),
    ("wide_resnet50_2", "convolution", 64, {}),
    ("mobilenet_v3_large", "convolution", 64, {}),
    ("mnasnet0_5", "convolution", 64, {}),
    ("shufflenet_v2_x0_5", "convolution", 64, {}),
    ("efficientnet_v2_s", "stochastic depth", 64, {}),
    ("regnet_y_400mf", "convolution", 64, {}),
    ("regnet_x_400mf", "convolution", 64, {}),
    ("swin_v2_t", "stochastic depth", 64, {}),
    ("maxvit_t", "stochastic depth", 224, {}),
    ("fcn_resnet50", "segmentation", 64, {"weights_backbone": None}),
    ("deeplabv3_resnet50", "segmentation", 64, {"weights_backbone": None}),
    ("lraspp_mobilenet_v3_large", "segmentation", 64, {"weights_backbone": None}),
]:
    torchvision(name, family, size, **settings)
torchvision("resnet18", "convolution", 32, trains=True)
torchvision("mobilenet_v2", "convolution", 64, trains=True, rate=1e-5, dropout=0.0)
torchvision("vit_b_16", "vision transformer", 224, dropout=0.0)
torchvision("efficientnet_b0", "stochastic depth", 64, trains=True, dropout=0.0, stochastic_depth_prob=0.0)
torchvision("convnext_tiny", "stochastic depth", 64, trains=True, stochastic_depth_prob=0.0)
for name in ["r3d_18", "mc3_18", "r2plus1d_18"]:
    torchvision(name, "video", shape=(3, 8, 32, 32))
torchvision("s3d", "video", shape=(3, 16, 224, 224))
torchvision("mvit_v2_s", "video", shape=(3, 16, 224, 224))
torchvision("swin3d_t", "video", shape=(3, 8, 64, 64))


def drawn(name, size):
    """Stochastic depth with its rate above 0: runs repeat, whatever the plan."""

    def build(batch):
        import torchvision.models as zoo

        return zoo.get_model(name, weights=None, num_classes=CLASSES), {"x": image(batch, size)}

    add(f"torchvision/{name}+depth", "stochastic depth", build, repeats=True)


drawn("convnext_tiny", 64)
drawn("swin_t", 64)


def detection_backbone(batch):
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5), {"x": image(batch, 64)}


add("torchvision/resnet18_fpn", "detection", detection_backbone)


def retinanet_head(batch):
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.models.detection.retinanet import RetinaNetHead

    class Detector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
            self.head = RetinaNetHead(256, 3, 4)

        def forward(self, x):
            return self.head(list(self.backbone(x).values()))

    return Detector(), {"x": image(batch, 64)}


add("torchvision/retinanet_head", "detection", retinanet_head)


def raft(batch):
    import torchvision.models.optical_flow as flow

    module = flow.raft_small(weights=None)
    return module, {"image1": image(batch, 128), "image2": image(batch, 128)}


add("torchvision/raft_small", "optical flow", raft)

# --- timm ------------------------------------------------------------------------------------------------------------


def timm(name, size=None, family="timm", trains=False, **settings):
    def build(batch):
        import timm as library

        if size and "img_size" not in settings:
            try:
                module = library.create_model(name, num_classes=CLASSES, img_size=size, **settings)
            except TypeError:
                module = library.create_model(name, num_classes=CLASSES, **settings)
        else:
            module = library.create_model(name, num_classes=CLASSES, **settings)
        channels, height, width = module.default_cfg.get("input_size", (3, 224, 224))
        if size:
            height = width = size
        return module, {"x": torch.randn(batch, channels, height, width)}

    add(f"timm/{name}", family, build, trains=trains, rate=1e-3)


SMALL = {"size": 64}
for name, settings in {
    "bat_resnext26ts": {}, "beit_base_patch16_224": {}, "botnet26t_256": {}, "caformer_s18": SMALL,
    "cait_xxs24_224": {}, "coat_tiny": {}, "coatnet_nano_rw_224": {}, "convformer_s18": SMALL, "convit_tiny": {},
    "convmixer_768_32": SMALL, "convnext_atto": SMALL, "convnextv2_atto": SMALL, "crossvit_tiny_240": {},
    "cs3darknet_s": SMALL, "cspresnet50": SMALL, "darknet53": SMALL, "davit_tiny": SMALL, "deit_tiny_patch16_224": {},
    "deit3_small_patch16_224": {}, "densenet121": SMALL, "dla34": SMALL, "dm_nfnet_f0": SMALL, "dpn48b": SMALL,
    "eca_nfnet_l0": SMALL, "ecaresnet26t": SMALL, "edgenext_xx_small": SMALL, "efficientformer_l1": {},
    "efficientformerv2_s0": {}, "efficientnet_lite0": SMALL, "efficientnetv2_rw_t": SMALL, "efficientvit_b0": SMALL,
    "efficientvit_m0": {}, "ese_vovnet19b_dw": SMALL, "eva02_tiny_patch14_224": {}, "fastvit_t8": SMALL,
    "fbnetc_100": SMALL, "flexivit_small": {}, "focalnet_tiny_srf": SMALL, "gcresnet33ts": SMALL, "gcvit_xxtiny": {},
    "gernet_s": SMALL, "ghostnet_050": SMALL, "ghostnetv2_100": SMALL, "gluon_resnet18_v1b": SMALL, "gmixer_12_224": {},
    "gmlp_ti16_224": {}, "halonet26t": {}, "haloregnetz_b": {}, "hardcorenas_a": SMALL, "hgnet_tiny": SMALL,
    "hgnetv2_b0": SMALL, "hiera_tiny_224": {}, "hrnet_w18_small": SMALL, "inception_next_atto": SMALL,
    "inception_resnet_v2": {}, "inception_v4": {}, "lambda_resnet26t": {}, "lcnet_050": SMALL, "legacy_xception": {},
    "levit_128s": {}, "maxvit_nano_rw_256": {}, "maxxvit_rmlp_nano_rw_256": {}, "mambaout_femto": SMALL,
    "mixer_s32_224": {}, "mixnet_s": SMALL, "mobilenet_edgetpu_v2_xs": SMALL,
    "mobilenetv3_small_050": SMALL, "mobilenetv4_conv_small": SMALL, "mobileone_s0": SMALL, "mobilevit_xxs": SMALL,
    "mobilevitv2_050": SMALL, "mvitv2_tiny": {}, "nasnetalarge": {}, "nest_tiny": {}, "nextvit_small": SMALL,
    "nf_regnet_b0": SMALL, "nf_resnet50": SMALL, "nfnet_f0": SMALL, "pit_ti_224": {}, "pnasnet5large": {},
    "poolformer_s12": SMALL, "poolformerv2_s12": SMALL, "pvt_v2_b0": SMALL, "regnetv_040": SMALL, "regnetx_002": SMALL,
    "regnetz_005": SMALL, "repghostnet_050": SMALL, "repvgg_a0": SMALL, "repvit_m0_9": SMALL, "res2net50_14w_8s": SMALL,
    "resmlp_12_224": {}, "resnest14d": SMALL, "resnetaa34d": SMALL, "resnetv2_50": SMALL, "rexnet_100": SMALL,
    "samvit_base_patch16_224": {"depth": 2}, "sebotnet33ts_256": {}, "selecsls42": SMALL, "semnasnet_075": SMALL,
    "sequencer2d_s": {}, "seresnet18": SMALL, "shvit_s1": SMALL, "skresnet18": SMALL, "spnasnet_100": SMALL,
    "starnet_s1": SMALL, "swiftformer_xs": {}, "swin_tiny_patch4_window7_224": {}, "swinv2_cr_tiny_224": {},
    "swinv2_tiny_window8_256": {}, "tf_efficientnet_b0": SMALL, "tf_mixnet_s": SMALL, "tiny_vit_5m_224": {},
    "tinynet_e": SMALL, "tnt_s_patch16_224": {}, "tresnet_m": SMALL, "twins_pcpvt_small": {}, "twins_svt_small": {},
    "visformer_tiny": {}, "vit_tiny_patch16_224": {}, "vit_relpos_small_patch16_224": {}, "vit_srelpos_small_patch16_224": {},
    "vit_small_r26_s32_224": {}, "vit_so150m_patch16_reg4_gap_256": {"depth": 2}, "vitamin_small_224": {},
    "volo_d1_224": {}, "xception41": SMALL, "xcit_nano_12_p16_224": {}, "csatv2": {},
    "naflexvit_base_patch16_gap": {"depth": 2},
}.items():
    timm(name, **settings)
timm("convnext_zepto_rms", family="stochastic depth", size=64, drop_path_rate=0.2)
timm("vit_pe_core_tiny_patch16_384", family="vision transformer")
timm("vit_base_patch16_rope_224", family="vision transformer", depth=2, trains=True)

# --- transformers ----------------------------------------------------------------------------------------------------

TEXT = {
    "use_cache": False,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
# Dropouts of configurations, so that losses can be compared.
STILL = {
    key: 0.0
    for key in [
        "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "dropout", "activation_dropout", "classifier_dropout", "layerdrop",
        "embed_dropout", "resid_dropout", "dropout_rate", "summary_last_dropout", "emb_pdrop", "ffn_pdrop",
        "feat_proj_dropout", "final_dropout", "mask_time_prob", "drop_path_rate", "ffn_dropout",
        "residual_dropout",
    ]
} | {"apply_spec_augment": False}


def configured(model_type, settings):
    """The configuration of a kind of model; only settings that it has are set."""
    import transformers

    config = transformers.AutoConfig.for_model(model_type)
    known = set(config.to_dict()) | set(getattr(config, "attribute_map", {}))
    now = config.to_dict()
    # A dropout of 0.0 where the configuration has a list or a whole number is another setting of that name.
    own = lambda key, value: key not in now or not isinstance(value, float) or isinstance(now[key], float)
    fit = {key: value for key, value in settings.items() if key in known and value is not None and own(key, value)}
    config = transformers.AutoConfig.for_model(model_type, **fit)
    if "decoder_start_token_id" in settings and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = settings["decoder_start_token_id"]
    return config


def transformer(model_type, auto, inputs, settings=None, family="decoder", name=None, trains=False, loss="output",
                still=True, base=TEXT):
    def build(batch):
        import transformers

        config = configured(model_type, {**base, **(STILL if still else {}), **(settings or {})})
        module = getattr(transformers, auto)
        module = module.from_config(config) if auto.startswith("Auto") else module(config)
        return module, inputs(batch, config)

    add(f"transformers/{name or model_type}", family, build, trains=trains, loss=loss)


def labelled(batch, config, length=16):
    """Words, a mask of them, and the words again as labels: what a training script passes."""
    ids = words(batch, length)
    # A copy: torch.export takes one object under two names for one input.
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def plain(batch, config, length=16):
    return {"input_ids": words(batch, length)}


def unmasked(batch, config, length=16):
    ids = words(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


CAUSAL = "AutoModelForCausalLM"
for model_type, base, settings in [
    ("gpt_neo", TEXT, {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8}),
    ("gpt_neox", TEXT, {}),
    ("gptj", TEXT, {"rotary_dim": 8}),
    ("opt", TEXT, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("bloom", TEXT, {}),
    ("falcon", TEXT, {}),
    ("mpt", TEXT, {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    ("codegen", TEXT, {"rotary_dim": 8}),
    ("stablelm", GROUPED, {}),
    ("phi", GROUPED, {}),
    ("phi3", GROUPED, {}),
    ("mistral", GROUPED, {"sliding_window": 8}),
    ("ministral", GROUPED, {}),
    ("qwen2", GROUPED, {}),
    ("qwen3", GROUPED, {}),
    ("gemma", GROUPED, {}),
    ("gemma2", GROUPED, {"sliding_window": 8}),
    ("olmo", GROUPED, {}),
    ("olmo2", GROUPED, {}),
    ("olmo3", GROUPED, {}),
    ("granite", GROUPED, {}),
    ("cohere", GROUPED, {}),
    ("cohere2", GROUPED, {"sliding_window": 8}),
    ("starcoder2", GROUPED, {}),
    ("nemotron", GROUPED, {}),
    ("glm", GROUPED, {}),
    ("glm4", GROUPED, {}),
    ("exaone4", GROUPED, {}),
    ("smollm3", GROUPED, {}),
    ("helium", GROUPED, {}),
    ("ernie4_5", GROUPED, {}),
    ("seed_oss", GROUPED, {}),
    ("hunyuan_v1_dense", GROUPED, {}),
    ("arcee", GROUPED, {}),
    ("lfm2", GROUPED, {"full_attn_idxs": [1], "block_ff_dim": 96}),
    ("apertus", GROUPED, {}),
    ("diffllama", GROUPED, {}),
    ("persimmon", TEXT, {}),
    ("biogpt", TEXT, {}),
    ("xglm", TEXT, {"d_model": 64, "attention_heads": 4, "num_layers": 2, "ffn_dim": 96}),
    ("ctrl", TEXT, {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96}),
    ("openai-gpt", TEXT, {}),
    ("bitnet", GROUPED, {}),
    ("jetmoe", GROUPED, {"kv_channels": 16, "num_local_experts": 4}),
    ("vaultgemma", GROUPED, {}),
]:
    transformer(model_type, CAUSAL, labelled, settings, base=base)
transformer("gpt2", CAUSAL, labelled, trains=True)
transformer("gpt2", CAUSAL, labelled, name="gpt2+dropout", still=False)
transformer("llama", CAUSAL, labelled, base=GROUPED, trains=True)
transformer("llama", CAUSAL, plain, base=GROUPED, name="llama+logits")
transformer("qwen3", CAUSAL, unmasked, base=GROUPED, name="qwen3+unmasked", trains=True)
transformer("gemma3_text", CAUSAL, labelled, {"sliding_window": 8}, base=GROUPED, trains=True)

EXPERTS = {
    **GROUPED, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "decoder_sparse_step": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "sliding_window": 8,
}
for model_type in [
    "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "olmoe", "phimoe", "granitemoe", "dbrx",
    "ernie4_5_moe", "glm4_moe", "dots1", "hunyuan_v1_moe", "minimax", "flex_olmo",
]:
    settings = {}
    if model_type.startswith("deepseek"):
        settings = {"num_key_value_heads": 4, "head_dim": 16}
    if model_type == "dbrx":
        settings = {"d_model": 64, "n_heads": 4, "n_layers": 2, "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8}}
    transformer(model_type, CAUSAL, labelled, settings, family="mixture of experts", base=EXPERTS)
transformer("mixtral", CAUSAL, labelled, {"router_jitter_noise": 0.0}, family="mixture of experts", base=EXPERTS, trains=True)

for model_type, settings, trains in [
    ("mamba", {"state_size": 8, "intermediate_size": 128}, True),
    ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}, False),
    ("falcon_mamba", {"state_size": 8}, False),
    ("rwkv", {"attention_hidden_size": 64, "context_length": 64}, False),
    ("recurrent_gemma", {"num_key_value_heads": 1, "head_dim": 16, "lru_width": 64, "num_hidden_layers": 3, "attention_window_size": 8}, False),
    ("jamba", {"num_key_value_heads": 2, "mamba_d_state": 8, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_offset": 1, "attn_layer_period": 2}, False),
    ("bamba", {"num_key_value_heads": 2, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8, "attn_layer_indices": [1]}, False),
    ("qwen3_next", {**EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}, False),
]:
    transformer(model_type, CAUSAL, unmasked, settings, family="state space", trains=trains)

MASKED = "AutoModelForMaskedLM"
for model_type, settings in [
    ("roberta", {}), ("distilbert", {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 96}),
    ("albert", {"embedding_size": 32}), ("electra", {"embedding_size": 64}), ("deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16}),
    ("deberta-v2", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}),
    ("mobilebert", {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}), ("camembert", {}), ("xlm-roberta", {}),
    ("convbert", {"embedding_size": 64}), ("mpnet", {}), ("squeezebert", {"embedding_size": 64}), ("fnet", {"tpu_short_seq_length": 16}),
    ("modernbert", {"local_attention": 8}), ("ernie", {}), ("esm", {"position_embedding_type": "rotary"}), ("layoutlm", {}),
    ("nystromformer", {"segment_means_seq_len": 16, "num_landmarks": 4}), ("roformer", {"embedding_size": 64}), ("rembert", {"input_embedding_size": 32, "output_embedding_size": 32}),
    ("megatron-bert", {}), ("ibert", {}), ("longformer", {"attention_window": [8, 8]}), ("funnel", {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 96, "block_sizes": [1, 1]}),
]:
    transformer(model_type, MASKED, labelled, settings, family="encoder")
transformer("bert", MASKED, labelled, family="encoder", trains=True)


def classified(batch, config):
    ids = words(batch, 16)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(batch) % 2}


transformer("bert", "AutoModelForSequenceClassification", classified, family="encoder", name="bert+classes", trains=True)
transformer("xlnet", "AutoModelForCausalLM", lambda b, c: {"input_ids": words(b, 16)}, {"d_model": 64, "n_head": 4, "n_layer": 2, "d_inner": 96}, family="encoder")

SEQ2SEQ = {
    **TEXT, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "d_kv": 16, "d_ff": 96, "decoder_start_token_id": 0,
}
for model_type in ["mt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "longt5", "blenderbot-small", "umt5", "prophetnet", "led"]:
    settings = {"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "attention_window": [8, 8]}
    if model_type in ("mt5", "umt5", "longt5"):
        settings["num_layers"] = 2
    transformer(model_type, "AutoModelForSeq2SeqLM", labelled, settings, family="encoder-decoder", base=SEQ2SEQ)
transformer("t5", "AutoModelForSeq2SeqLM", labelled, family="encoder-decoder", base=SEQ2SEQ, trains=True)

WHISPER = {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32}


def spoken(batch, config):
    return {"input_features": torch.randn(batch, 16, 64), "labels": words(batch, 12)}


transformer("whisper", "AutoModelForSpeechSeq2Seq", spoken, family="encoder-decoder", base=WHISPER, trains=True)

SPEECH = {
    **TEXT, "conv_dim": [32, 32, 32], "conv_stride": [5, 2, 2], "conv_kernel": [10, 3, 3], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "hidden_size": 64, "vocab_size": 32,
}


def waves(batch, config):
    return {"input_values": torch.randn(batch, 1200)}


for model_type in ["wav2vec2", "hubert", "wavlm", "unispeech-sat", "data2vec-audio", "sew"]:
    transformer(model_type, "AutoModel", waves, {"squeeze_factor": 2, "num_buckets": 32, "conv_pos_kernel_size": 7, "num_conv_pos_embeddings": 4 if model_type == "data2vec-audio" else 16}, family="speech", base=SPEECH, loss="mse")
transformer("audio-spectrogram-transformer", "AutoModel", lambda b, c: {"input_values": torch.randn(b, 64, 32)}, {"max_length": 64, "num_mel_bins": 32, "patch_size": 16}, family="speech", loss="mse")
transformer("speech_to_text", "AutoModelForSpeechSeq2Seq", lambda b, c: {"input_features": torch.randn(b, 40, 16), "labels": words(b, 12)}, {"input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64, "max_target_positions": 32}, family="speech", base=SEQ2SEQ)

VISION = {
    **TEXT, "image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": CLASSES, "depths": [1, 1, 2, 1],
    "hidden_sizes": [16, 24, 32, 40], "embed_dim": 24, "num_heads": [1, 2, 2, 4], "window_size": 4,
}


def pixels(batch, config):
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


CLASSIFIER = "AutoModelForImageClassification"
for model_type, settings in [
    ("vit", {}), ("beit", {}), ("dinov2", {}), ("dinov2_with_registers", {}), 
    ("resnet", {}), 
    ("poolformer", {"hidden_sizes": [16, 24, 32, 40]}), ("mobilenet_v2", {}), ("regnet", {}), ("efficientnet", {"image_size": 64}),
    ("pvt", {"num_attention_heads": [1, 2, 2, 4], "patch_sizes": [4, 2, 2, 2]}), ("levit", {"image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "patch_size": 16}),
    ("focalnet", {"embed_dim": 24, "depths": [1, 1, 1, 1], "patch_size": 2}),
    ("hiera", {"image_size": [64, 64], "embed_dim": 24, "patch_size": [7, 7], "num_heads": [1, 2, 4, 8]}), ("ijepa", {}),
]:
    transformer(model_type, CLASSIFIER, pixels if "image_size" not in settings else (lambda b, c: {"pixel_values": torch.randn(b, 3, 64, 64)}), settings, family="vision transformer", base=VISION, loss="cross-entropy")
# At the sizes of the originals.
for model_type, size, trains in [
    ("swin", 224, True), ("swinv2", 256, False), ("segformer", 64, False), ("convnext", 64, False), ("convnextv2", 64, False), ("cvt", 64, False), ("bit", 64, False), ("deit", 224, False),
]:
    transformer(model_type, CLASSIFIER, lambda b, c, size=size: {"pixel_values": torch.randn(b, 3, size, size)}, {"num_labels": CLASSES, "drop_path_rate": None if model_type == "cvt" else 0.0}, family="vision transformer", base={}, loss="cross-entropy", trains=trains)
transformer("segformer", "SegformerForSemanticSegmentation", lambda b, c: {"pixel_values": torch.randn(b, 3, 64, 64)}, {"num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32}, family="segmentation", name="segformer+masks", base=VISION)


def towers(batch, config):
    ids = words(batch, 16)
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32), "attention_mask": torch.ones_like(ids)}


def multimodal(model_type, class_name, text, vision, inputs, extra=None, name=None):
    def build(batch):
        import transformers

        config = transformers.AutoConfig.for_model(model_type)
        small = {"text_config": {**config.text_config.to_dict(), **text} if text is not None else None, "vision_config": {**config.vision_config.to_dict(), **vision}}
        small = {key: value for key, value in small.items() if value is not None}
        config = transformers.AutoConfig.for_model(model_type, **small, **(extra or {}))
        return getattr(transformers, class_name)(config), inputs(batch, config)

    add(f"transformers/{name or model_type}", "multimodal", build)


TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURE = {**TOWER, "image_size": 32, "patch_size": 8}
multimodal("clip", "CLIPModel", {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}, PICTURE, towers, {"projection_dim": 32})
multimodal("siglip", "SiglipModel", {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "projection_size": 64}, PICTURE, towers)
multimodal("blip", "BlipModel", {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "encoder_hidden_size": 64}, PICTURE, towers, {"projection_dim": 32})


def llava(batch):
    import transformers

    vision = transformers.CLIPVisionConfig(**PICTURE)
    text = configured("llama", GROUPED)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=100, vision_feature_layer=-1, image_seq_length=16)
    ids = words(batch, 24, 99)
    ids[:, 2:18] = 100
    return transformers.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 32, 32), "attention_mask": torch.ones_like(ids)}


add("transformers/llava", "multimodal", llava)


def detr(batch):
    import transformers

    backbone = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1], out_features=["stage4"])
    config = transformers.DetrConfig(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_queries=10, num_labels=5)
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(batch, 3, 64, 64), "pixel_mask": torch.ones(batch, 64, 64, dtype=torch.long)}


add("transformers/detr", "detection", detr)
transformer("yolos", "AutoModelForObjectDetection", lambda b, c: {"pixel_values": torch.randn(b, 3, 32, 32)}, {"image_size": [32, 32], "num_detection_tokens": 10}, family="detection", base=VISION)


def decision(batch, config):
    return {"past_values": torch.randn(batch, 32, 3)}


transformer("patchtst", "AutoModel", decision, {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 32, "ffn_dim": 48}, family="time series", loss="mse")

# --- diffusers -------------------------------------------------------------------------------------------------------


def diffusion(name, class_name, settings, inputs, trains=False):
    def build(batch):
        import diffusers

        return getattr(diffusers, class_name)(**settings), inputs(batch)

    add(f"diffusers/{name}", "diffusion", build, trains=trains, loss="mse")


def noisy(batch):
    return {"sample": torch.randn(batch, 3, 16, 16), "timestep": torch.randint(0, 1000, (batch,))}


def text_batch(batch):
    return {"sample": torch.randn(batch, 4, 16, 16), "timestep": torch.randint(0, 1000, (batch,)), "encoder_hidden_states": torch.randn(batch, 7, 32)}


diffusion("unet2d", "UNet2DModel", {"sample_size": 16, "block_out_channels": (32, 64), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8}, noisy, trains=True)
diffusion("unet2d_condition", "UNet2DConditionModel", {"sample_size": 16, "block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1, "norm_num_groups": 8, "attention_head_dim": 8, "cross_attention_dim": 32}, text_batch, trains=True)
diffusion("dit", "DiTTransformer2DModel", {"sample_size": 8, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "patch_size": 2, "num_embeds_ada_norm": 10}, lambda b: {"hidden_states": torch.randn(b, 4, 8, 8), "timestep": torch.randint(0, 1000, (b,)), "class_labels": torch.randint(0, 10, (b,))})
diffusion("sd3", "SD3Transformer2DModel", {"sample_size": 8, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "patch_size": 2, "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 24, "pos_embed_max_size": 8}, lambda b: {"hidden_states": torch.randn(b, 4, 8, 8), "timestep": torch.randint(0, 1000, (b,)), "encoder_hidden_states": torch.randn(b, 7, 32), "pooled_projections": torch.randn(b, 24)})
diffusion("flux", "FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "patch_size": 1, "joint_attention_dim": 32, "pooled_projection_dim": 24, "axes_dims_rope": (4, 4, 8)}, lambda b: {"hidden_states": torch.randn(b, 16, 4), "encoder_hidden_states": torch.randn(b, 7, 32), "pooled_projections": torch.randn(b, 24), "timestep": torch.rand(b), "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(7, 3)})
diffusion("vae", "AutoencoderKL", {"in_channels": 3, "out_channels": 3, "block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8}, lambda b: {"sample": torch.randn(b, 3, 32, 32)})
diffusion("pixart", "PixArtTransformer2DModel", {"sample_size": 8, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "patch_size": 2, "cross_attention_dim": 64, "caption_channels": 32, "use_additional_conditions": False}, lambda b: {"hidden_states": torch.randn(b, 4, 8, 8), "timestep": torch.randint(0, 1000, (b,)), "encoder_hidden_states": torch.randn(b, 7, 32)})
