//! Unique node names and module paths of ONNX files.

use std::collections::HashSet;

use crate::import::onnx::proto::NodeProto;

/// Unique, non-empty names for `nodes`, which depend only on the file.
///
/// The first node with a name keeps it. An unnamed node at index `i` becomes `OP_i`. Further nodes with the same name
/// get the suffix `_1`, `_2`, …, skipping names that are taken.
pub fn unique_names(nodes: &[NodeProto]) -> Vec<String> {
    let mut used_names: HashSet<&str> = HashSet::with_capacity(nodes.len());
    let first: Vec<bool> = nodes.iter().map(|node| !node.name().is_empty() && used_names.insert(node.name())).collect();
    let mut used_names: HashSet<String> = used_names.into_iter().map(str::to_owned).collect();
    // The next suffix per name. Avoids quadratic time for many nodes with the same name.
    let mut next = std::collections::HashMap::<String, usize>::new();
    let mut names = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        if first[index] {
            names.push(node.name().to_owned());
            continue;
        }
        let unnamed = node.name().is_empty();
        let stem = if unnamed { format!("{}_{index}", node.op_type()) } else { node.name().to_owned() };
        let name = if unnamed && !used_names.contains(&stem) {
            stem
        } else {
            let count = next.entry(stem.clone()).or_insert(1);
            loop {
                let name = format!("{stem}_{count}");
                *count += 1;
                if !used_names.contains(&name) {
                    break name;
                }
            }
        };
        used_names.insert(name.clone());
        names.push(name);
    }
    names
}

/// The path of the source module of a node, such as `layer1.0.conv1`; empty for the root or if the file has none.
///
/// Sources, in this order: the metadata `pkg.torch.onnx.name_scopes` (a Python list of paths that ends with the node's
/// name), the metadata `namespace` (`path: class/path: class/…`), and the node name in the form `/scope/scope/Op`.
pub fn module_path(node: &NodeProto) -> String {
    let property = |key: &str| node.metadata_props.iter().find(|p| p.key() == key).map(|p| p.value());
    if let Some(scopes) = property("pkg.torch.onnx.name_scopes").and_then(python_list) {
        return scopes.iter().rev().nth(1).cloned().unwrap_or_default();
    }
    if let Some(space) = property("namespace") {
        let scopes: Vec<&str> = space.split('/').collect();
        let module = scopes.len().checked_sub(2).map(|at| scopes[at]).unwrap_or_default();
        return module.split(':').next().unwrap_or_default().trim().to_owned();
    }
    scope_of(node.name())
}

/// The module path in a node name. PyTorch repeats a container's name in its children: `/layer1/layer1.0/Conv`.
fn scope_of(name: &str) -> String {
    let Some((scopes, _op)) = name.rsplit_once('/') else { return String::new() };
    let mut path: Vec<&str> = Vec::new();
    for scope in scopes.split('/').filter(|scope| !matches!(*scope, "" | "." | "..")) {
        if let Some(last) = path.last()
            && scope.strip_prefix(last).is_some_and(|rest| rest.starts_with('.'))
        {
            path.pop();
        }
        path.push(scope);
    }
    path.join(".")
}

/// Parses the `repr` of a Python list of plain strings; `None` for any other text.
fn python_list(text: &str) -> Option<Vec<String>> {
    let mut unread = text.trim().strip_prefix('[')?.strip_suffix(']')?.trim();
    let mut items = Vec::new();
    while !unread.is_empty() {
        let quote = unread.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (item, after) = unread[1..].split_once(quote)?;
        items.push(item.to_owned());
        unread = after.trim_start();
        unread = unread.strip_prefix(',').unwrap_or(unread).trim_start();
    }
    Some(items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::onnx::proto::StringStringEntryProto;

    fn node(name: &str, op: &str) -> NodeProto {
        NodeProto { name: Some(name.into()), op_type: Some(op.into()), ..Default::default() }
    }

    #[test]
    fn names_become_unique_and_stay_where_they_can() {
        let nodes = [
            node("", "Gemm"),
            node("a", "Relu"),
            node("a", "Relu"),
            node("", "Gemm"),
            node("Gemm_3", "Add"),
            node("a_1", "Add"),
            node("a", "Add"),
        ];
        assert_eq!(unique_names(&nodes), ["Gemm_0", "a", "a_2", "Gemm_3_1", "Gemm_3", "a_1", "a_3"]);
    }

    #[test]
    fn module_paths() {
        for (name, path) in [
            ("/1/a/qkv/MatMul", "1.a.qkv"),
            ("/layer3/layer3.0/downsample/downsample.1/BatchNormalization", "layer3.0.downsample.1"),
            ("/m/transformer/h.5/mlp/act/Pow", "m.transformer.h.5.mlp.act"),
            ("/Flatten", ""),
            ("node_conv2d", ""),
            ("../../tmp/x", "tmp"),
        ] {
            assert_eq!(scope_of(name), path, "{name}");
        }
        let mut renamed = node("node_conv2d", "Conv");
        let entry =
            |key: &str, value: &str| StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) };
        renamed.metadata_props = vec![entry("namespace", ": a.Net/features: b.Seq/features.0: c.Conv2d/conv2d: aten")];
        assert_eq!(module_path(&renamed), "features.0");
        renamed.metadata_props.push(entry("pkg.torch.onnx.name_scopes", "['', 'features', 'features.3', 'conv2d']"));
        assert_eq!(module_path(&renamed), "features.3");
    }
}
